"""Programs that others wrote, and Spark, over TLS."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock import Client
from penstock.spark import connection
from tests.nats.test_clients import NATS_JS, install_nats_js
from tests.support.certificates import Certificates
from tests.support.process import PATIENCE_S
from tests.support.server import Serve

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SCRIPT: Final = """
import { connect } from "nats";
const [url, caFile, certFile, keyFile] = process.argv.slice(2);
const client = await connect({ servers: url, tls: { caFile, certFile, keyFile } });
const subscription = client.subscribe("js.>", { max: 2 });
client.publish("js.a", "hello");
client.publish("js.b", new Uint8Array(500000));
const seen = [];
for await (const message of subscription) seen.push([message.subject, message.data.length]);
console.log(JSON.stringify({ seen, required: client.info.tls_required }));
await client.close();
"""


def test_nats_js(server: Serve, certificates: Certificates, tmp_path: Path) -> None:
    node = install_nats_js(tmp_path, NATS_JS)
    (tmp_path / "tls.mjs").write_text(_SCRIPT)
    options = certificates.options("js")
    arguments = [f"nats://localhost:{server.port}", str(options.ca), str(options.cert), str(options.key)]

    done = subprocess.run(
        [node, "tls.mjs", *arguments], cwd=tmp_path, check=False, capture_output=True, text=True, timeout=PATIENCE_S
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"seen": [["js.a", 5], ["js.b", 500_000]], "required": True}


def test_spark_reads_and_writes(spark: SparkSession, server: Serve, certificates: Certificates) -> None:
    """With the CA as text, which executors need no file for."""
    cert, key = certificates.client("spark")
    options = {
        "servers": f"tls://localhost:{server.port}",
        "tlsCa": certificates.ca.read_text(),
        "tlsCert": str(cert),
        "tlsKey": str(key),
    }
    try:
        with Client(f"localhost:{server.port}", tls=certificates.options()) as client:
            client.create_topic("spark", partitions=2)
        rows = spark.createDataFrame([(b"%d" % number,) for number in range(100)], "value binary")
        rows.write.format("penstock").options(**options, topic="spark").mode("append").save()

        read = spark.read.format("penstock").options(**options, subscribe="spark").load()

        assert sorted(int(row.value) for row in read.select("value").collect()) == list(range(100))
    finally:
        connection.close()

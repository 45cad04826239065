"""Source and sink where tasks run in other processes: a standalone master with two workers, Spark's own cluster in one
machine, and a Spark Connect server. All are started from PySpark's wheel.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import pytest

import penstock
from penstock.spark import java
from tests.conftest import SparkBroker
from tests.support.server import clean_environment

# Up to five JVMs start at once. Only a test that fails, or a machine that is very busy, waits so long.
PATIENCE_S: Final = 600.0
pytestmark = pytest.mark.timeout(2 * PATIENCE_S)

ROOT: Final = Path(__file__).parents[2]
COUNT: Final = 1000
# Messages that become dead letters.
BAD: Final = [b"bad %d" % number for number in range(50)]

# Reads the topic `numbers` as a table, and copies it as a stream to the topic that it is given.
JOB: Final = """
import sys
from penstock.spark import session

servers, where, directory, target = sys.argv[1:]
config = {"spark.sql.shuffle.partitions": "2"}
if where.startswith("sc://"):
    spark = session("job", remote=where, config=config)
else:
    # One core for each executor, and so both of them.
    config |= {"spark.executor.memory": "512m", "spark.executor.cores": "1", "spark.local.dir": directory + "/local"}
    spark = session("job", master=where, config=config)
options = {"servers": servers, "subscribe": "numbers"}
rows = spark.read.format("penstock").options(**options).load()
print("rows", *rows.selectExpr("count(*)", "count(distinct value)").first())
options |= {"startingOffsets": "earliest", "maxOffsetsPerTrigger": "400"}
query = (
    spark.readStream.format("penstock").options(**options).load().select("value", "key")
    .writeStream.format("penstock").options(servers=servers, topic=target)
    .option("checkpointLocation", directory + "/checkpoint").trigger(availableNow=True).start()
)
query.awaitTermination()
if not where.startswith("sc://"):
    print("executors", len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1)
spark.stop()
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[SparkBroker]:
    """One with the numbers below COUNT in the four partitions of a topic."""
    with SparkBroker(listen="127.0.0.1:0") as broker:
        broker.create_topic("numbers", partitions=4)
        broker.publish_many(penstock.Outgoing("numbers", b"%d" % n, key=b"%d" % n) for n in range(COUNT))
        yield broker


def test_a_standalone_master_with_two_workers(broker: SparkBroker, tmp_path: Path) -> None:
    host = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
    with daemon(tmp_path, "master", ["spark-class", "org.apache.spark.deploy.master.Master", *host]) as first:
        master = wait_for(first, r"Starting Spark master at (spark://127\.0\.0\.1:\d+)")
        command = ["spark-class", "org.apache.spark.deploy.worker.Worker", *host, "--cores", "1", "--memory", "600m"]
        with (
            daemon(tmp_path, "one", [*command, "--work-dir", str(tmp_path / "work-one"), master]) as one,
            daemon(tmp_path, "two", [*command, "--work-dir", str(tmp_path / "work-two"), master]) as two,
        ):
            for worker in (one, two):
                wait_for(worker, r"(Successfully registered with master)")

            told = run_job(broker, master, tmp_path, "from_standalone")
            run_pipeline_despite_kills(broker, master, one, tmp_path)

    assert told == [f"rows {COUNT} {COUNT}", "executors 2"]
    assert numbers(broker, "from_standalone") == list(range(COUNT))
    assert sorted(doubled(broker)) == [(number, 2 * number) for number in range(COUNT)]
    assert sorted(letter.value for letter in broker.dead_letters("orders", limit=COUNT)) == sorted(BAD)


@pytest.mark.soak  # the same executors, with a master and workers that share the JVM of the driver
def test_a_cluster_in_one_machine(broker: SparkBroker, tmp_path: Path) -> None:
    told = run_job(broker, "local-cluster[2,1,600]", tmp_path, "from_local_cluster")

    assert told == [f"rows {COUNT} {COUNT}", "executors 2"]
    assert numbers(broker, "from_local_cluster") == list(range(COUNT))


def test_a_spark_connect_server(broker: SparkBroker, tmp_path: Path) -> None:
    pytest.importorskip("grpc", reason="Spark Connect's client is not installed")
    settings = {
        "spark.connect.grpc.binding.address": "127.0.0.1",
        "spark.connect.grpc.binding.port": "0",
        "spark.ui.enabled": "false",
        "spark.local.dir": str(tmp_path / "local"),
        "spark.sql.warehouse.dir": str(tmp_path / "warehouse"),
    }
    flags = [part for key, value in settings.items() for part in ("--conf", f"{key}={value}")]
    main = "org.apache.spark.sql.connect.service.SparkConnectServer"
    command = ["spark-submit", "--master", "local[2]", "--class", main, *flags, "spark-internal"]
    with daemon(tmp_path, "connect", command) as server:
        port = wait_for(server, r"Spark Connect server started at: \S*?:(\d+)")

        told = run_job(broker, f"sc://127.0.0.1:{port}", tmp_path, "from_connect")

    assert told == [f"rows {COUNT} {COUNT}"]
    assert numbers(broker, "from_connect") == list(range(COUNT))


def numbers(broker: SparkBroker, topic: str) -> list[int]:
    batches = [
        batch
        for partition in range(broker.topic(topic).partitions)
        for batch in broker.fetch(topic, partition, arrow=True)
    ]
    return sorted(int(value) for batch in batches for value in batch.column("value").to_pylist())


def run_job(broker: SparkBroker, where: str, directory: Path, target: str) -> list[str]:
    command = [sys.executable, "-c", JOB, broker.servers, where, str(directory), target]
    with daemon(directory, "job", command) as job:
        # The last line that it writes.
        wait_for(job, r"(exit code \d+)\n")
        text = job.log.read_text()
    assert "exit code 0\n" in text, text
    return re.findall(r"^(?:rows|executors) .*$", text, re.MULTILINE)


PIPELINE: Final = """
name = "doubled"
kind = "transform"

[source]
servers = "{servers}"
topic = "orders"
schema = "n long"
options = {{ maxOffsetsPerTrigger = 100 }}

[transform]
sql = "SELECT n, 2 * n AS twice FROM source"

[sink]
topic = "doubled"
"""


def run_pipeline_despite_kills(broker: SparkBroker, master: str, worker: Daemon, directory: Path) -> None:
    """Kill a worker with its executor, then the driver, and run the pipeline again to its end."""
    broker.create_topic("orders", partitions=4)
    broker.create_topic("doubled", partitions=4)
    orders = [b'{"n":%d}' % n for n in range(COUNT)]
    for place, value in enumerate(BAD):
        # Among the others, so that most batches have some.
        orders.insert(place * (COUNT // len(BAD)), value)
    broker.publish_many(penstock.Outgoing("orders", value, key=value) for value in orders)
    file = directory / "doubled.toml"
    file.write_text(PIPELINE.format(servers=broker.servers))
    command = [sys.executable, "-m", "penstock", "pipeline", "run", str(file), "--master", master]
    with daemon(directory, "driver", command) as driver:
        wait_until_stored(broker, 200, driver)
        worker.kill()
        # With the other worker alone.
        wait_until_stored(broker, stored(broker) + 200, driver)
        driver.kill()
    before = stored(broker)
    with daemon(directory, "again", command) as driver:
        assert wait_for(driver, r"exit code (\d+)\n") == "0", driver.log.read_text()
    assert 0 < before < COUNT, "it was killed on the way"


def stored(broker: SparkBroker) -> int:
    return sum(position.end - position.start for position in broker.topic("doubled").positions)


def wait_until_stored(broker: SparkBroker, count: int, driver: Daemon) -> None:
    until = time.monotonic() + PATIENCE_S
    while stored(broker) < count:
        text = driver.log.read_text(errors="replace")
        assert "exit code " not in text, text
        assert time.monotonic() < until, text
        time.sleep(0.02)


def doubled(broker: SparkBroker) -> list[tuple[int, int]]:
    rows = [json.loads(each.value) for partition in range(4) for each in broker.fetch("doubled", partition)]
    return [(row["n"], row["twice"]) for row in rows]


# ---- processes


class Daemon(NamedTuple):
    log: Path
    process: subprocess.Popen[bytes]

    def kill(self) -> None:
        """Kill it, and all that it started itself."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()


@contextmanager
def daemon(directory: Path, name: str, command: Sequence[str]) -> Iterator[Daemon]:
    """What a command started ends with the block, with all that it started itself. Its output is in a file."""
    path = directory / f"{name}.log"
    home = spark_home(directory)
    script = home / "bin" / command[0]
    environment = clean_environment() | {
        "JAVA_HOME": str(java.find().home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_HOME": str(home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_LOCAL_DIRS": str(directory / "local"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
        # Up to five JVMs share two cores: each collects with one thread.
        "JDK_JAVA_OPTIONS": f"{os.environ.get('JDK_JAVA_OPTIONS', '')} -XX:+UseSerialGC",
        # For a pipeline; the job sets these itself.
        "PYSPARK_SUBMIT_ARGS": "--conf spark.executor.memory=512m --conf spark.executor.cores=1 pyspark-shell",
        # Of a master, a worker, a Connect server: the last has the least that a driver may have, and some.
        "SPARK_DAEMON_MEMORY": "600m",
    }
    line = [str(script) if script.exists() else command[0], *command[1:]]
    with path.open("wb") as log:
        process = subprocess.Popen(
            ["sh", "-c", '"$@"; echo "exit code $?"', "sh", *line],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            # A group of its own: a worker starts executors, and they start Python.
            start_new_session=True,
        )
    started = Daemon(path, process)
    try:
        yield started
    finally:
        started.kill()


def spark_home(directory: Path) -> Path:
    """The wheel, as seen from a place of our own: Spark's cluster in one machine leaves its work where its home is."""
    import pyspark

    home = directory / "spark"
    home.mkdir(exist_ok=True)
    for name in ("bin", "jars", "python", "sbin"):
        link = home / name
        if not link.is_symlink():
            link.symlink_to(Path(pyspark.__file__).parent / name)
    return home


def wait_for(started: Daemon, pattern: str) -> str:
    """What it says, once it has said it."""
    until = time.monotonic() + PATIENCE_S
    while True:
        text = started.log.read_text(errors="replace")
        found = re.search(pattern, text)
        if found:
            return found[1]
        assert "exit code " not in text, text
        assert time.monotonic() < until, f"there is no {pattern!r} in:\n{text}"
        time.sleep(0.05)

"""A driver that is killed: after its sink has committed a batch, and before Spark has taken note of it.

Every task of it fails once, after it has staged its rows, and is run again.

    python -m tests.support.spark_driver SERVERS DIRECTORY LAST

It writes the numbers 0 to 999 to the topic `numbers`, once, and the lines of the files in DIRECTORY/in, of each in a
batch, to the topic `lines`, with its checkpoint in DIRECTORY/checkpoint. The commit of batch LAST is its last deed.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark import TaskContext
from pyspark.sql.types import StructType

from penstock.spark import session
from penstock.spark.datasource import PenstockDataSource


def main(servers: str, directory: Path, last: int) -> None:
    # Each task may be tried four times.
    spark = session("driver", master="local[2,4]", config={"spark.local.dir": str(directory / "local")})
    jvm = spark._jvm
    assert jvm is not None
    spark.dataSource.register(doomed((jvm.java.lang.ProcessHandle.current().pid(), os.getpid()), last))
    numbers = spark.range(0, 1000, numPartitions=3).selectExpr("cast(id as string) as value")
    numbers.write.format("doomed").mode("append").options(servers=servers, topic="numbers", txnId="n").save()
    lines = spark.readStream.option("maxFilesPerTrigger", 1).text(str(directory / "in"))
    query = (
        lines.writeStream.format("doomed")
        .options(servers=servers, topic="lines", checkpointLocation=str(directory / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


def doomed(processes: tuple[int, ...], last: int) -> type[PenstockDataSource]:
    """A source whose writers do what they must, and then fail."""

    def fail_once(staged: Any) -> Any:
        task = TaskContext.get()
        assert task is not None
        if task.attemptNumber() == 0:
            raise RuntimeError("the first try fails, after all of it is done")
        return staged

    # Classes within a function are sent to the workers whole: they cannot import this module.
    class Doomed(PenstockDataSource):
        @classmethod
        def name(cls) -> str:
            return "doomed"

        def writer(self, schema: StructType, overwrite: bool) -> Any:
            writer: Any = super().writer(schema, overwrite)
            write = writer.write
            writer.write = lambda batches: fail_once(write(batches))
            return writer

        def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
            writer: Any = super().streamWriter(schema, overwrite)
            write, commit = writer.write, writer.commit

            def last_deed(messages: list[Any], batch: int) -> None:
                commit(messages, batch)
                if batch == last:
                    for process in processes:
                        os.kill(process, signal.SIGKILL)

            def staged(batches: Iterator[Any]) -> Any:
                return fail_once(write(batches))

            writer.write, writer.commit = staged, last_deed
            return writer

    return Doomed


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))

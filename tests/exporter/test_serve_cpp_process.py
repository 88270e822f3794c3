"""The C++ server as a process: signals, pipes, limits of the system, and what its command line says."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import recfx
from examples.serve_cpp.client import parse_answers, request_text
from tests.exporter import cpp_server
from tests.exporter.cpp_server import parsed, run, version_of
from tests.exporter.hashed_models import by_name, call, trained

GOOD = by_name(call(3, seed=1))

without_sanitizers = pytest.mark.skipif(
    bool(os.environ.get(cpp_server.SANITIZE)), reason="sanitizers need files and address space of their own"
)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two versions of a file."""
    folder, model = tmp_path_factory.mktemp("served"), trained()
    paths = [folder / "first.pt", folder / "second.pt"]
    for path in paths:
        recfx.export(model, path, call(6))
        model.linear.weight.data.mul_(2)
    return paths


class Server:
    """A server that is running; ``said`` waits for a line on its standard error, and ``before`` has those before it."""

    def __init__(self, *command: str | Path) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=cpp_server.environment()
        )
        assert self.process.stdin
        assert self.process.stdout
        assert self.process.stderr
        self.input, self.output, self._errors = self.process.stdin, self.process.stdout, self.process.stderr
        self._stuck = threading.Timer(60, self.process.kill)  # so that a server that hangs is a failure
        self._stuck.start()

    def said(self, pattern: str) -> str:
        self.before: list[str] = []
        for line in self._errors:
            if re.match(pattern, line):
                return line
            self.before.append(line)
        raise AssertionError(f"the server has not said {pattern}")

    def ask(self) -> str:
        """The version that answers now."""
        self.input.write(request_text("1", GOOD))
        self.input.flush()
        return next(parse_answers(self.output)).version

    def end(self) -> int:
        self.input.close()
        status = self.process.wait(60)
        self.close()
        return status

    def close(self) -> None:
        self._stuck.cancel()
        self.process.kill()
        self.process.wait(60)
        for stream in (self.input, self.output, self._errors):
            if not stream.closed:
                stream.close()


@pytest.fixture
def serve(program: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*arguments: str | Path) -> Server:
        started.append(Server(program, *arguments))
        started[-1].said("loaded\t")
        return started[-1]

    yield start
    for server in started:
        server.close()


# The file


def test_what_takes_the_place_of_the_file_is_said_once_and_the_next_file_is_loaded(
    serve: Callable[..., Server], files: list[Path], tmp_path: Path
) -> None:
    """A pipe must not stop the server, whose thread would wait for somebody to write into it."""
    path = tmp_path / "model.pt"
    shutil.copy(files[0], path)
    server = serve(path, "--watch", "0.02")
    os.mkfifo(tmp_path / "pipe")
    os.replace(tmp_path / "pipe", path)
    assert "[no_file]" in server.said("not reloaded\t")
    time.sleep(0.2)  # it looks ten times more
    assert server.ask() == version_of(files[0])
    shutil.copy(files[1], tmp_path / "next.pt")
    os.replace(tmp_path / "next.pt", path)
    assert server._errors.readline() == f"reloaded\t{version_of(files[1])}\n"
    assert server.ask() == version_of(files[1])
    assert server.end() == 0


@without_sanitizers
def test_a_file_that_could_not_be_opened_is_loaded_as_soon_as_it_can(
    serve: Callable[..., Server], files: list[Path], tmp_path: Path
) -> None:
    path = tmp_path / "model.pt"
    shutil.copy(files[0], path)
    server = serve(path, "--watch", "0.02")
    soft, hard = resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (3, hard))
    shutil.copy(files[1], tmp_path / "next.pt")
    os.replace(tmp_path / "next.pt", path)
    assert "Too many open files [cannot_read]" in server.said("not reloaded\t")
    resource.prlimit(server.process.pid, resource.RLIMIT_NOFILE, (soft, hard))
    server.said("reloaded\t")
    assert server.ask() == version_of(files[1])
    assert server.end() == 0


def test_a_file_is_optimized_before_it_answers(
    serve: Callable[..., Server], files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TorchScript logs the graphs that it optimizes; that of a file takes the module itself."""
    monkeypatch.setenv("PYTORCH_JIT_LOG_LEVEL", ">>profiling_graph_executor_impl")
    path = tmp_path / "model.pt"
    shutil.copy(files[0], path)
    server = serve(path, "--watch", "0.02")
    said = [server.before]
    assert server.ask() == version_of(files[0])
    shutil.copy(files[1], tmp_path / "next.pt")
    os.replace(tmp_path / "next.pt", path)
    server.said("reloaded\t")
    said.append(server.before)
    assert server.ask() == version_of(files[1])
    server.input.close()
    server.said("served\t")
    said.append(server.before)
    assert [any("graph(%self" in line for line in lines) for lines in said] == [True, True, False]


def test_a_library_in_the_current_directory(program: Path, tmp_path: Path) -> None:
    report = recfx.export(trained(), tmp_path / "model.pt", call(6), portable=False)
    (tmp_path / "ops.so").symlink_to(report.libraries[0])
    done = run(program, "--check", "model.pt", "--library", "ops.so", cwd=tmp_path)
    assert done.stdout.startswith("ok\t"), done.stdout + done.stderr


# Requests and answers


def test_lines_may_end_with_carriage_return_and_line_feed(program: Path, files: list[Path]) -> None:
    text = "".join(request_text(id, GOOD) for id in "12")
    with_line_feeds, with_both = (run(program, files[0], text=lines) for lines in (text, text.replace("\n", "\r\n")))
    assert with_both.stdout == with_line_feeds.stdout
    assert [answer.error for answer in parsed(with_both.stdout)] == ["", ""]


def test_the_lines_of_one_request_together_have_a_limit(program: Path, files: list[Path]) -> None:
    line = "1" * 90_000_000
    text = "".join(f"x{number}\tuint8\t1\t{line}\n" for number in range(3))
    done = run(program, files[0], text=f"request\tlong\n{text}end\n" + request_text("good", GOOD))
    long, good = parsed(done.stdout)
    assert (long.id, long.error) == ("long", "it is too long [bad_request]")
    assert (good.id, good.error) == ("good", "")


@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_reading_and_what_was_read_is_answered(
    serve: Callable[..., Server], files: list[Path], sent: int
) -> None:
    server = serve(files[0], "--threads", "2")
    server.input.write(request_text("whole", GOOD) + request_text("half", GOOD).removesuffix("end\n"))
    server.input.flush()
    answers = parse_answers(server.output)
    assert next(answers).id == "whole"
    server.process.send_signal(sent)
    (half,) = answers
    assert (half.id, half.error) == ("half", "it has no end [bad_request]")
    server.said("served\t2 requests")
    assert server.process.wait(60) == 0


def test_every_request_is_counted(program: Path, files: list[Path]) -> None:
    """Also when there have been more than it keeps the latencies of, which must not take ever more memory."""
    done = subprocess.run(
        [program, files[0]], input="end\n" * 1_000_001, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        timeout=120, env=cpp_server.environment(), check=False,
    )  # fmt: skip
    assert "served\t1000001 requests, p50 " in done.stderr


def test_answers_that_nobody_reads_end_the_server_with_an_error(
    serve: Callable[..., Server], files: list[Path]
) -> None:
    server = serve(files[0])
    server.output.close()
    server.input.write(request_text("1", GOOD))
    server.input.flush()
    assert "Broken pipe [no_output]" in server.said("error\tanswers cannot be written")
    assert server.process.wait(60) == 1


def test_requests_that_cannot_be_read(program: Path, files: list[Path], tmp_path: Path) -> None:
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "nowhere", "No such file or directory")):
        done = run(program, files[0], "--requests", path)
        assert done.returncode == 1
        assert f"error\t{path} cannot be read: {why} [no_file]\n" in done.stderr


# The command line


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--threads", "2x"], "--threads takes a number from 1 to 1024, not '2x'"),
        (["--threads", "1025"], "--threads takes"),
        (["--threads"], "--threads needs a value"),
        (["--watch", "inf"], "--watch takes a number from 0 to 1000000, not 'inf'"),
        (["--watch", "nan"], "--watch takes"),
        (["--bench", "1s"], "--bench takes"),
        (["--no-such-option"], "there is no option --no-such-option"),
        (["other.pt"], "it takes one file"),
    ],
)
def test_the_error_of_a_wrong_command_line(program: Path, files: list[Path], options: list[str], message: str) -> None:
    done = run(program, files[0], *options)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error\t{message}")
    assert "usage: recfx_serve MODEL" in done.stderr


def test_help(program: Path) -> None:
    for option in ("--help", "-h"):
        done = run(program, option)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("usage: recfx_serve MODEL")

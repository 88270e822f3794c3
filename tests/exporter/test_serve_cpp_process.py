"""The C++ server as a process: signals, pipes, limits of the system, and what its command line says."""

import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import recfx
from examples.serve_cpp.client import parse_answers, request_text
from tests.exporter import cpp_server
from tests.exporter.cpp_server import version_of
from tests.exporter.hashed_models import by_name, call, trained

GOOD = by_name(call(3, seed=1))


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


def test_answers_under_load_are_those_of_one_of_the_files(
    serve: Callable[..., Server], files: list[Path], tmp_path: Path
) -> None:
    """Two threads, files that change and are damaged, bad requests."""
    path, damaged = tmp_path / "model.pt", tmp_path / "damaged.pt"
    shutil.copy(files[0], path)
    damaged.write_bytes(files[0].read_bytes()[:-1000])
    server = serve(path, "--threads", "2", "--watch", "0.02")
    requests = [by_name(call(size, seed=size)) for size in (0, 1, 5, 64)]
    requests.append({**GOOD, "features.d.values": GOOD["features.d.values"] + 10**9})
    loaded = {version_of(file): recfx.load(file) for file in files}
    expected = {version: [model.serve(inputs) for inputs in requests[:-1]] for version, model in loaded.items()}
    replaced = threading.Event()

    def send() -> None:
        number = 0
        while not replaced.is_set():
            server.input.write(request_text(str(number), requests[number % len(requests)]))
            number += 1
        server.input.close()

    def replace() -> None:
        for content in [damaged, files[1], files[0]] * 3:
            shutil.copy(content, tmp_path / "next.pt")
            os.replace(tmp_path / "next.pt", path)
            server.said("not reloaded\t" if content is damaged else "reloaded\t")
        replaced.set()

    threads = [threading.Thread(target=task) for task in (send, replace)]
    for thread in threads:
        thread.start()
    answers = {int(answer.id): answer for answer in parse_answers(server.output)}
    for thread in threads:
        thread.join(60)
    assert sorted(answers) == list(range(len(answers)))
    for number, answer in answers.items():
        which = number % len(requests)
        if which == len(requests) - 1:
            assert answer.error.endswith("[id_out_of_range]")
        else:
            output = expected[answer.version][which]["output"]
            torch.testing.assert_close(answer.outputs["output"], output, rtol=1e-6, atol=1e-7)
    assert {answer.version for answer in answers.values()} >= expected.keys()


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

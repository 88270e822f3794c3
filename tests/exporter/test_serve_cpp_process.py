"""The C++ server as a process: signals, pipes, limits of the system, and what its command line says."""

import functools
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.optim import _apply_optimizer_in_backward

import recfx
from examples.serve_cpp.client import Answer, parse_answers, request_text
from recfx.exporter.load import manifest_of_file
from tests.exporter import cpp_server
from tests.exporter.changed_records import forge, rewrite, with_another, with_manifest
from tests.exporter.cpp_server import version_of
from tests.exporter.hashed_models import HASHING, RecurrentModel, by_name, call, trained

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


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, list[str]]]:
    """From options of ``export`` to a folder, and to options of the server. ``base`` and its deltas ``1`` to ``4`` are
    of a model that is trained on: ids come and are evicted, -1 among them. ``other`` and ``other.1`` are a chain, too.
    """

    @functools.cache
    def made(**options: Any) -> tuple[Path, list[str]]:
        folder = tmp_path_factory.mktemp("chain")
        torch.manual_seed(0)
        evicting = {name: replace(HASHING[name], on_full="evict") for name in ("shared_by_two", "some_dense")}
        model: Any = recfx.convert(RecurrentModel(), hashing={**HASHING, **evicting})
        tables = [parameter for name, parameter in model.named_parameters() if "embedding" in name]
        _apply_optimizer_in_backward(torch.optim.SGD, tables, {"lr": 0.5})
        names = ["base", "1", "2", "3", "4", "other", "other.1"]
        for number, (last, name) in enumerate(zip(["", *names], names, strict=False)):
            model.train()
            model(*call(12, seed=number, low=-15 * number, high=30).args).pow(2).sum().backward()
            model.linear.weight.data.mul_(1.1)
            model.recurrent.weight_ih_l0.data.mul_(1.1)
            model.scaled.low = model.scaled.low + 1
            if name in ("base", "other"):
                report = recfx.export(model.eval(), folder / name, call(6), **options)
            else:
                recfx.export_delta(model.eval(), folder / name, base=folder / last)
        return folder, [text for path in report.libraries for text in ("--library", str(path))]

    return made


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

    def answer(self) -> Answer:
        """To the good request."""
        self.input.write(request_text("1", GOOD))
        self.input.flush()
        return next(parse_answers(self.output))

    def ask(self) -> str:
        """The version that answers now."""
        return self.answer().version

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


def put(content: Path, path: Path) -> None:
    """Copy a file to a path in one step."""
    shutil.copy(content, hidden := path.with_name(f".{path.name}"))
    os.replace(hidden, path)


def answers_meanwhile(
    server: Server, requests: list[dict[str, torch.Tensor]], change: Callable[[], None]
) -> dict[int, Answer]:
    """The answers to these requests, sent over and over until ``change`` returns; by number, counted on."""

    def send() -> None:
        number = 0
        while not changed.done():
            server.input.write(request_text(str(number), requests[number % len(requests)]))
            number += 1
        server.input.close()

    with ThreadPoolExecutor(2) as pool:
        changed = pool.submit(change)
        pool.submit(send)
        answers = {int(answer.id): answer for answer in parse_answers(server.output)}
        changed.result()
    assert sorted(answers) == list(range(len(answers)))
    return answers


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
    put(files[1], path)
    assert server.said(".*").startswith(f"reloaded\t{version_of(files[1])}\t0\t{path}\t")
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
    put(files[1], path)
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

    def replace() -> None:
        for content in [damaged, files[1], files[0]] * 3:
            put(content, path)
            server.said("not reloaded\t" if content is damaged else "reloaded\t")

    answers = answers_meanwhile(server, requests, replace)
    for number, answer in answers.items():
        which = number % len(requests)
        if which == len(requests) - 1:
            assert answer.error.endswith("[id_out_of_range]")
        else:
            output = expected[answer.version][which]["output"]
            torch.testing.assert_close(answer.outputs["output"], output, rtol=1e-6, atol=1e-7)
    assert {answer.version for answer in answers.values()} >= expected.keys()


# Deltas


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"portable": False}, {"device": "npu"}], ids=str)
def test_deltas_are_applied_in_order_while_requests_are_answered(
    serve: Callable[..., Server], chain: Callable[..., Any], options: dict[str, Any], tmp_path: Path
) -> None:
    folder, libraries = chain(**options)
    requests = [by_name(call(size, seed=size, low=-60, high=60)) for size in (0, 1, 5, 64)]
    loaded = recfx.load(folder / "base")
    expected = {version_of(folder / "base"): [loaded.serve(inputs)["output"] for inputs in requests]}
    for name in "123":
        loaded.apply(folder / name)
        expected[version_of(folder / name)] = [loaded.serve(inputs)["output"] for inputs in requests]
    (tmp_path / ".1").write_text("is being written")
    server = serve(folder / "base", "--deltas", tmp_path, "--threads", "2", *libraries)

    def send_deltas() -> None:
        for put_now, applied in (("2", ""), ("1", "12"), ("3", "3")):
            put(folder / put_now, tmp_path / put_now)
            for name in applied:
                assert re.match(
                    rf"applied\t{version_of(folder / name)}\t{name}\t{tmp_path / name}\t\d+\.\d+$", server.said(".*")
                )
            time.sleep(0.5)  # while requests are answered

    answers = answers_meanwhile(server, requests, send_deltas)
    seen = {answer.version for answer in answers.values()}
    assert seen >= {version_of(folder / name) for name in ("base", "2", "3")}  # that of 1 may be gone at once
    for number, answer in answers.items():
        assert torch.equal(answer.outputs["output"], expected[answer.version][number % len(requests)])
    again = serve(folder / "base", "--deltas", tmp_path, *libraries)
    assert again.ask() == version_of(folder / "3")  # before it answers, it applies what is there


def test_what_is_no_next_delta_is_said_once_and_new_bases_take_over(
    serve: Callable[..., Server], chain: Callable[..., Any], tmp_path: Path
) -> None:
    folder, _ = chain()
    model, deltas = tmp_path / "model.pt", tmp_path / "deltas"
    deltas.mkdir()
    put(folder / "base", model)
    server = serve(model, "--deltas", deltas, "--watch", "0.02")
    for name in "123":
        put(folder / name, deltas / f"{name}.delta")
        server.said("applied\t")
    loaded = recfx.load(folder / "base").apply(folder / "1").apply(folder / "2").apply(folder / "3")
    described = manifest_of_file(folder / "4")["delta"]
    changes: list[dict[str, Any]] = [
        {"stretches": [{**described["stretches"][0], **wrong}]}
        for wrong in ({"tensor": "nowhere"}, {"begin": -1}, {"count": 1}, {"count": 2**61}, {"unit": 3}, {"which": "x"})
    ]
    changes += [{"tensors": {"linear.weight": "which_0"}}, {"attributes": {"ebc_find_rows": {"completed": [1]}}}]
    refused = {"doubled": "delta_out_of_order", "base": "not_a_delta", "other.1": "delta_of_other_base"}
    refused |= {"cut": "damaged_file", "another": "damaged_file", "text": "damaged_file"}
    refused |= {f"forged.{number}": "damaged_file" for number in range(len(changes))}
    for name, source in (("doubled", "1"), ("base", "base"), ("other.1", "other.1"), ("served", "3")):
        put(folder / source, deltas / name)
    (tmp_path / "cut").write_bytes((folder / "4").read_bytes()[:-1000])
    (tmp_path / "text").write_text("text")
    rewrite(folder / "4", tmp_path / "another", with_another)
    for number, change in enumerate(changes):
        forge(folder / "4", tmp_path / f"forged.{number}", with_manifest(delta={**described, **change}))
    for path in tmp_path.iterdir():
        if path.is_file() and path != model:
            put(path, deltas / path.name)
    lines = [server.said("not applied\t") for _ in refused]
    said = [re.findall(r"deltas/(\S+) .*\[(\w+)\]", line)[0] for line in lines]
    assert sorted(said) == sorted(refused.items())
    time.sleep(0.3)  # it looks ten times more
    answer = server.answer()
    assert answer.version == version_of(folder / "3")
    assert torch.equal(answer.outputs["output"], loaded.serve(GOOD)["output"])
    recfx.merge_deltas(folder / "base", [folder / "1", folder / "2", folder / "3"], tmp_path / "merged")
    for content, expected in (
        (tmp_path / "merged", "reloaded\t.*\t3\t"), (folder / "base", r"not reloaded\t.*\[older_version\]"),
        (folder / "1", r"not reloaded\t.*\[is_a_delta\]"),
    ):  # fmt: skip
        put(content, model)
        assert re.match(expected, server.said(".*"))
    put(folder / "4", deltas / "4")
    assert "\t4\t" in server.said(".*")
    assert torch.equal(server.answer().outputs["output"], loaded.apply(folder / "4").serve(GOOD)["output"])
    put(folder / "other", model)
    assert [server.said("reloaded|applied").split("\t")[2] for _ in range(2)] == ["0", "1"]
    other = recfx.load(folder / "other").apply(folder / "other.1")
    assert torch.equal(server.answer().outputs["output"], other.serve(GOOD)["output"])


# The end


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

"""Load on the C++ server: two threads, newer and damaged files, bad requests; every answer is compared with Python's.

python -m tests.exporter.serve_soak --minutes 10
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

import recfx
from examples.serve_cpp.client import parse_answers, request_text
from tests.exporter import cpp_server
from tests.exporter.cpp_server import version_of
from tests.exporter.hashed_models import by_name, call, trained

_OUTSTANDING = 100


@dataclass
class Figures:
    """What a soak has seen.

    Args:
        answers: answers that equal Python's.
        errors: bad requests that were answered by the error that they deserve.
        reloads: newer files that were loaded.
        refused: damaged files that were refused.
        by_version: answers by the version of the file that gave them.
        megabytes: the server's memory after each file.
        seconds: how long it took.
    """

    answers: int = 0
    errors: int = 0
    reloads: int = 0
    refused: int = 0
    by_version: Counter[str] = field(default_factory=Counter)
    megabytes: list[float] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        memory = self.megabytes
        third = max(1, len(memory) // 3)
        return (
            f"{self.seconds:.0f} s: {self.answers} answers as in Python, {self.answers / self.seconds:.0f} per second; "
            f"{self.errors} bad requests refused, {self.reloads} newer files loaded, {self.refused} damaged files "
            f"refused; memory {max(memory[third : 2 * third], default=0):.0f} MB at most in the second third, "
            f"{max(memory[2 * third :], default=0):.0f} MB in the last"
        )


class _Client:
    """Sends requests without end, and compares what comes back."""

    def __init__(self, server: subprocess.Popen[bytes], files: list[Path]) -> None:
        self.server = server
        self.figures = Figures()
        self.problems: list[str] = []
        self.outstanding = threading.Semaphore(_OUTSTANDING)
        self.waiting: dict[str, int] = {}
        self.stops = threading.Event()
        good = [by_name(call(size, seed=size)) for size in (0, 1, 2, 3, 5, 8, 13, 64)]
        bad = _bad(by_name(call(3, seed=1)))
        self.texts = [request_text("ID", inputs) for inputs, _ in bad] + [request_text("ID", body) for body in good] * 3
        self.reasons = [reason for _, reason in bad]
        loaded = {version_of(path): recfx.load(path) for path in files}
        self.expected = {
            (len(bad) + number, version): model.serve(good[number % len(good)])
            for version, model in loaded.items()
            for number in range(len(self.texts) - len(bad))
        }
        self.threads = [threading.Thread(target=task) for task in (self.send, self.receive, self.listen)]

    def send(self) -> None:
        assert self.server.stdin
        number = 0
        try:
            while not self.stops.is_set():
                self.outstanding.acquire()
                which = number % len(self.texts)
                self.waiting[str(number)] = which
                self.server.stdin.write(self.texts[which].replace("\tID\n", f"\t{number}\n", 1).encode())
                self.server.stdin.flush()
                number += 1
            self.server.stdin.close()
        except OSError as error:
            self.problems.append(f"the server does not read: {error}")

    def receive(self) -> None:
        assert self.server.stdout
        for answer in parse_answers(line.decode() for line in self.server.stdout):
            which = self.waiting.pop(answer.id, None)
            self.outstanding.release()
            if which is None:
                self.problems.append(f"nobody waits for {answer}")
            elif which < len(self.reasons):
                self.figures.errors += 1
                if not answer.error.endswith(f"[{self.reasons[which]}]"):
                    self.problems.append(f"request {which} needs error {self.reasons[which]}: {answer}")
            else:
                self.compare(which, answer.version, answer.outputs, answer.error)

    def compare(self, which: int, version: str, outputs: dict[str, torch.Tensor], error: str) -> None:
        expected = self.expected.get((which, version), {})
        if outputs.keys() != expected.keys() or not all(
            torch.allclose(outputs[name], expected[name], rtol=1e-6, atol=1e-7) for name in expected
        ):
            self.problems.append(f"request {which}, file {version}: {error or outputs} instead of {expected}")
        self.figures.answers += 1
        self.figures.by_version[version] += 1

    def wait_for_files(self, number: int) -> None:
        """Until the server has loaded or refused so many files."""
        give_up = time.monotonic() + 60
        while self.figures.reloads + self.figures.refused < number and not self.problems:
            if time.monotonic() > give_up:
                self.problems.append(f"the server has not noticed file {number}")
            time.sleep(0.01)

    def listen(self) -> None:
        assert self.server.stderr
        for line in self.server.stderr:
            event, _, message = line.decode().rstrip("\n").partition("\t")
            self.figures.reloads += event == "reloaded"
            self.figures.refused += event == "not reloaded"
            if event not in ("loaded", "reloaded", "not reloaded", "served"):
                self.problems.append(f"the server says: {event} {message}")


def _bad(good: dict[str, torch.Tensor]) -> list[tuple[dict[str, torch.Tensor], str]]:
    ids, lengths = good["features.a.values"], good["features.a.lengths"]
    return [
        ({**good, "features.z.values": ids}, "unknown_input"),
        ({**good, "features.a.values": ids.float()}, "wrong_id_dtype"),
        ({**good, "features.a.lengths": lengths + 1}, "bad_lengths"),
        ({**good, "features.a.lengths": -lengths - 1}, "bad_lengths"),
        ({**good, "features.d.values": good["features.d.values"] + 10**9}, "id_out_of_range"),
        ({"dense": good["dense"]}, "missing_input"),
    ]


def soak(
    program: Path, folder: Path, seconds: float, reload_every: float, may_grow: float | None, threads: int = 2
) -> Figures:
    """Serve for some time, and compare every answer.

    Args:
        program: the server.
        folder: where files are written.
        seconds: how long.
        reload_every: seconds from one file to the next, at least; every third one is damaged.
        may_grow: how many megabytes the server may take more in the last third than in the second; None: any.
        threads: of the server.

    Raises:
        AssertionError: an answer is wrong or missing, or memory grows.
    """
    model = trained()
    files = [folder / "first.pt", folder / "second.pt"]
    for path in files:
        recfx.export(model, path, call(6))
        with torch.no_grad():
            model.linear.weight.mul_(2)
    served = folder / "served.pt"
    shutil.copy(files[0], served)
    damaged = folder / "damaged.pt"
    damaged.write_bytes(files[0].read_bytes()[:-1000])
    command = [program, served, "--threads", str(threads), "--watch", "0.02"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, env=cpp_server.environment()) as server:
        client = _Client(server, files)
        for thread in client.threads:
            thread.start()
        begin, number = time.monotonic(), 0
        while (time.monotonic() - begin < seconds or number < 3) and not client.problems:
            time.sleep(reload_every)
            number += 1
            shutil.copy([damaged, files[1], files[0]][number % 3], folder / "next.pt")
            os.replace(folder / "next.pt", served)
            client.wait_for_files(number)
            client.figures.megabytes.append(_megabytes(server.pid))
        client.stops.set()
        for thread in client.threads:
            thread.join(60)
        client.figures.seconds = time.monotonic() - begin
        if client.waiting:
            client.problems.append(f"{len(client.waiting)} requests have no answer")
    if server.returncode != 0:
        client.problems.append(f"the server ended with {server.returncode}")
    assert not client.problems, "\n".join(client.problems[:20])
    memory = client.figures.megabytes
    third = len(memory) // 3
    if may_grow is not None:
        assert max(memory[2 * third :]) <= max(memory[third : 2 * third]) + may_grow, str(client.figures)
    return client.figures


def _megabytes(process: int) -> float:
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS")), 0.0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    arguments = parser.parse_args()
    program = cpp_server.build()
    with tempfile.TemporaryDirectory() as folder:
        figures = soak(program, Path(folder), arguments.minutes * 60, reload_every=1.0, may_grow=3.0)
    print(figures)
    return 0


if __name__ == "__main__":
    sys.exit(main())

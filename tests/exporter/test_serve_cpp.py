"""The C++ server of ``examples/serve_cpp``: answers, bad requests, and bad files."""

import json
import random
import subprocess
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import KeyedJaggedTensor

import recfx
from examples.serve_cpp.client import parse_answers, request_text
from recfx.exporter.manifest import OPERATOR_VERSIONS
from recfx.kernels.build import library
from tests.exporter import cpp_server
from tests.exporter.changed_records import (
    ChangeRecords,
    forge,
    rewrite,
    swapped,
    with_another,
    with_manifest,
    without_one,
)
from tests.exporter.conftest import UsualExport
from tests.exporter.cpp_server import answers, parsed, run, version_of
from tests.exporter.hashed_models import FEATURES, HASHING, HashedModel, SequenceModel, by_name, call, trained
from tests.files.stored import calls_of, facts_of, names, unpack

EXTREME = torch.tensor([-(2**63), 2**63 - 1, -1, 0, 1])


def with_extreme_ids() -> dict[str, torch.Tensor]:
    hashed = {f"features.{name}.values": EXTREME for name in FEATURES[:3]}
    lengths = {f"features.{name}.lengths": torch.tensor([5, 0]) for name in FEATURES}
    return {"dense": torch.zeros(2, 1), **hashed, "features.d.values": torch.tensor([0, 19, 0, 1, 2]), **lengths}


# Answers


@pytest.mark.parametrize("quantize", [None, "fp16", "int8", "int4"])
def test_answers_are_those_of_python(program: Path, quantize: str | None, usual_export: UsualExport) -> None:
    path = usual_export(False, quantize).path
    batches = [call(size, seed=size) for size in (0, 1, 7)] + [call(5, seed=3, low=-(2**63), high=2**63 - 1)]
    requests = [*map(by_name, batches), with_extreme_ids()]
    loaded = recfx.load(path)
    for request, answer in zip(requests, answers(program, path, requests), strict=True):
        expected = loaded.serve(request)["output"]
        assert answer.version == version_of(path)
        assert answer.outputs["output"].dtype == expected.dtype
        torch.testing.assert_close(answer.outputs["output"], expected, rtol=1e-6, atol=1e-7)


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cpp_server.require()
    return cpp_server.build_stranger(tmp_path_factory.mktemp("stranger"))


@pytest.mark.parametrize(
    "options", [{}, {"portable": False, "forward": "tensors"}, {"device": "cuda", "quantize": "int8"}], ids=str
)
@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
def test_programs_of_others_get_the_same_answers(
    stranger: Path, model_of: dict[bool, nn.Module], kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    """Batches of any size in any order, alone and by three threads at once; a fuser is on, which would fail."""
    is_weighted, path = kind == "weighted", tmp_path / "model.pt"
    model = trained(model=SequenceModel) if kind == "sequence" else model_of[is_weighted]
    report = recfx.export(model, path, call(6, is_weighted=is_weighted), **options)
    libraries = [*cpp_server.fbgemm_libraries(), *report.libraries]  # KeyedJaggedTensor has methods that need FBGEMM
    for sizes in ((0, 1, 7, 7, 0), (7, 7, 0, 1)):
        batches = [by_name(call(size, is_weighted=is_weighted)) for size in sizes]
        copies = [{name: tensor.clone() for name, tensor in batch.items()} for batch in batches]  # views of nothing
        torch.save(copies, tmp_path / "batches")
        done = run(stranger, path, tmp_path / "batches", tmp_path / "answers", *libraries)
        assert done.returncode == 0, done.stderr
        loaded = recfx.load(path)
        expected = [loaded.serve(batch) for batch in batches]
        for answered in torch.load(tmp_path / "answers", weights_only=False):
            for answer, wanted in zip(answered, expected, strict=True):
                assert torch.equal(answer["0" if "forward" in options else "output"], wanted["output"])


def test_a_weighted_collection_and_empty_bags(program: Path, usual_export: UsualExport) -> None:
    path = usual_export(True, None).path
    request = by_name(call(5, seed=9, is_weighted=True))
    empty = {name: tensor[:0] if "lengths" not in name else tensor * 0 for name, tensor in request.items()}
    empty["dense"] = request["dense"]
    not_a_number = {**request, "features.a.weights": request["features.a.weights"] * float("nan")}
    requests = [request, empty, not_a_number]
    loaded = recfx.load(path)
    for request, answer in zip(requests, answers(program, path, requests), strict=True):
        expected = loaded.serve(request)["output"]
        torch.testing.assert_close(answer.outputs["output"], expected, rtol=1e-6, atol=1e-7, equal_nan=True)


def test_a_file_that_is_not_portable(
    program: Path, model: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = recfx.export(model, tmp_path / "model.pt", call(6), portable=False)
    requests = [by_name(call(5, seed=9)), with_extreme_ids()]
    options = [text for path in report.libraries for text in ("--library", str(path))]
    assert len(options) == 2
    loaded = recfx.load(tmp_path / "model.pt")
    for request, answer in zip(requests, answers(program, tmp_path / "model.pt", requests, *options), strict=True):
        torch.testing.assert_close(answer.outputs["output"], loaded.serve(request)["output"], rtol=1e-6, atol=1e-7)
    ((kind, message),) = check(program, [tmp_path / "model.pt"])
    assert kind == "error"
    assert "--library" in message
    assert message.endswith("[no_library]")
    newest = OPERATOR_VERSIONS[-1]
    for version, reason in ((0, "other_operators"), (newest, ""), (newest + 1, "other_operators")):
        forge(tmp_path / "model.pt", tmp_path / "other.pt", with_manifest(operators_version=version))
        refused = run(program, tmp_path / "other.pt", "--inputs", *options).stderr
        assert f"[{reason}]" in refused if reason else refused == ""
    with monkeypatch.context() as patched:
        patched.setenv("RECFX_CPU_CAPABILITY", "nonsense")
        assert "[unknown_cpu_capability]" in run(program, tmp_path / "model.pt", "--inputs", *options).stderr
    report = recfx.export(model, tmp_path / "model.pt", call(6), device="cuda", quantize="int8", portable=False)
    assert (report.libraries, [note.code for note in report.notes]) == ((), ["needs_python"])
    ((kind, message),) = check(program, [tmp_path / "model.pt"])
    assert kind == "error"
    assert "those of recfx" in message
    assert message.endswith("only Python has them [no_library]")


class Negated(HashedModel):
    """Returns a view that torch negates when it is read."""

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.view_as_complex(self.linear(self.ebc(features).values()) + dense).conj().imag


class _Keeps(nn.Module):
    """Keeps its last input in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("last", torch.zeros(6, 1))

    def forward(self, output: torch.Tensor, dense: torch.Tensor) -> torch.Tensor:
        output = output + self.last.sum()
        self.last = dense
        return output


class KeepsInput(HashedModel):
    def __init__(self) -> None:
        super().__init__()
        self.keeps = _Keeps()

    def forward(self, dense: torch.Tensor, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.keeps(self.linear(self.ebc(features).values()) + dense, dense)


@pytest.mark.parametrize("of", [Negated, KeepsInput])
def test_memory_that_is_not_as_it_looks(program: Path, tmp_path: Path, of: type[HashedModel]) -> None:
    requests = [by_name(call(size, seed=size)) for size in (1, 4, 4, 300, 1, 5, 4)]
    recfx.export(recfx.convert(of(), hashing=HASHING).eval(), tmp_path / "model.pt", call(6))
    loaded = recfx.load(tmp_path / "model.pt")
    for request, answer in zip(requests, answers(program, tmp_path / "model.pt", requests), strict=True):
        torch.testing.assert_close(answer.outputs["output"], loaded.serve(request)["output"], rtol=1e-6, atol=1e-6)


def test_no_python_is_loaded(program: Path, file: Path) -> None:
    server = subprocess.Popen(
        [program, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=cpp_server.environment()
    )
    with server:
        assert server.stdin
        assert server.stdout
        server.stdin.write(request_text("1", by_name(call(1))))
        server.stdin.flush()
        next(parse_answers(server.stdout))
        maps = Path(f"/proc/{server.pid}/maps").read_text()
        server.stdin.close()
    loaded = {line.split()[-1] for line in maps.splitlines() if ".so" in line}
    assert any(path.endswith("fbgemm_gpu_py.so") for path in loaded)
    assert not [path for path in loaded if "python" in Path(path).name]


def test_it_says_its_inputs_and_how_it_is_used(program: Path, file: Path) -> None:
    done = run(program, file, "--inputs")
    assert done.stdout.splitlines() == list(by_name(call(1)))
    for wrong in ([], [file, "--threads"], [file, "--threads", "x"], [file, "--no-such-option"], [file, file]):
        assert run(program, *wrong).returncode == 2


# Bad requests

GOOD = by_name(call(3, seed=1))
OVERFLOWING = torch.tensor([2**63 - 1, 2**63 - 1, GOOD["features.a.values"].numel() + 2])  # as the sum of int64
WRONG: list[tuple[dict[str, torch.Tensor | None], str]] = [
    ({"features.z.values": torch.zeros(1)}, "unknown_input"),
    ({"features.a.values": GOOD["features.a.values"].float()}, "wrong_id_dtype"),
    ({"features.a.values": GOOD["features.a.values"].view(1, -1)}, "bad_ids"),
    ({"features.a.lengths": -GOOD["features.a.lengths"]}, "bad_lengths"),
    ({"features.a.lengths": GOOD["features.a.lengths"][:-1]}, "bad_lengths"),
    ({"features.a.lengths": GOOD["features.a.lengths"] + 1}, "bad_lengths"),
    ({"features.a.lengths": GOOD["features.a.lengths"].double()}, "bad_lengths"),
    ({"features.a.lengths": OVERFLOWING}, "bad_lengths"),
    ({"features.d.values": GOOD["features.d.values"] + 20}, "id_out_of_range"),
    ({"features.d.values": GOOD["features.d.values"] - 20}, "id_out_of_range"),
    ({"dense": torch.zeros(2, 1)}, "wrong_batch_size"),
    ({"dense": torch.zeros(3)}, "wrong_rank"),
    ({"dense": torch.zeros(3, 1).long()}, "wrong_dtype"),
    ({"dense": None}, "missing_input"),
    ({"features.b.lengths": None}, "missing_input"),
]


def test_a_bad_request_is_an_error_and_the_next_one_is_served(program: Path, file: Path) -> None:
    bad = [{name: value for name, value in {**GOOD, **wrong}.items() if value is not None} for wrong, _ in WRONG]
    received = answers(program, file, [request for refused in bad for request in (refused, GOOD)])
    assert [answer.error.rpartition("[")[2] for answer in received[::2]] == [f"{reason}]" for _, reason in WRONG]
    assert not any(answer.error for answer in received[1::2])
    named = {1: "features.a: ids", 5: "features.a: ", 8: "feature d", 11: "dense", 14: "features.b.lengths"}
    for number, name in named.items():
        assert name in received[2 * number].error


class OfADict(HashedModel):
    """Its tensors are within one argument, and what torch says of their sizes ends with these in brackets."""

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        pooled = self.ebc(batch["features"]).values()
        return self.linear(pooled + batch["added"].expand_as(pooled))


def test_a_tensor_unlike_the_sample_is_named_as_in_python(program: Path, tmp_path: Path) -> None:
    sample = recfx.Sample({"features": call(6).args[1], "added": torch.rand(6, 29)})
    recfx.export(recfx.convert(OfADict(), hashing=HASHING).eval(), tmp_path / "model", sample)
    of_ids = {f"batch_{name}": tensor for name, tensor in GOOD.items() if name != "dense"}
    wrong = [torch.rand(3, 29).double(), torch.rand(3, 4), torch.rand(2, 29)]
    requests = [of_ids | {"batch_added": added} for added in wrong]
    loaded = recfx.load(tmp_path / "model")
    for request, answer in zip(requests, answers(program, tmp_path / "model", requests), strict=True):
        with pytest.raises(recfx.InputError) as raised:
            loaded.serve(request)
        assert answer.error == f"{raised.value.diagnostic.message[:-1]} [{raised.value.reason}]"
    forge(tmp_path / "model", tmp_path / "older", with_manifest(sizes={}))
    (answer,) = answers(program, tmp_path / "older", requests[2:])
    assert answer.error.endswith("Tensor sizes: [2, 29] [request_failed]")
    with pytest.raises(RuntimeError, match=r"Tensor sizes: \[2, 29\]"):
        recfx.load(tmp_path / "older").serve(requests[2])


UNREADABLE = [
    ("x\tint64\t1\t5\nend\n", "bad_request"),
    ("end\n", "bad_request"),
    ("request\t1\n", "bad_request"),
    ("request\t1\nx\tint64\t1\n", "bad_line"),
    ("request\t1\nx\tint64\t1\t5\t6\n", "bad_line"),
    ("request\t1\nx\tint16\t1\t5\n", "bad_dtype"),
    ("request\t1\nx\tint64\t-1\t5\n", "bad_shape"),
    ("request\t1\nx\tint64\t2\t5\n", "bad_shape"),
    ("request\t1\nx\tint64\t\t\n", "bad_shape"),
    ("request\t1\nx\tint64\t4611686018427387904,4\t\n", "bad_shape"),
    ("request\t1\nx\tint64\t9223372036854775807,9223372036854775807,0,5\t1\n", "bad_shape"),
    ("request\t1\nx\tint64\t1,1,1,1,1,1,1,1,1\t5\n", "bad_shape"),
    ("request\t1\nx\tint64\t1\t9223372036854775808\n", "bad_number"),
    ("request\t1\nx\tint32\t1\t2147483648\n", "bad_number"),
    ("request\t1\nx\tint64\t1\t5.0\n", "bad_number"),
    ("request\t1\nx\tint64\t2\t5  6\n", "bad_number"),
    ("request\t1\nx\tbool\t1\t2\n", "bad_number"),
    ("request\t1\nx\tfloat32\t1\t1e999\n", "bad_number"),
    ("request\t1\nx\tint64\t1\t5\nx\tint64\t1\t5\n", "duplicate_input"),
    ("request\t1\nx\tint64\t0,9223372036854775807,9223372036854775807\t\n", "request_failed"),
]


def test_a_request_that_cannot_be_read_is_an_error(program: Path, file: Path) -> None:
    texts = [text if text.endswith("end\n") or text.count("\n") == 1 else text + "end\n" for text, _ in UNREADABLE]
    good = request_text("good", GOOD)
    done = run(program, file, text="".join(text + good for text in texts))
    assert done.returncode == 0, done.stderr
    received = parsed(done.stdout)
    assert [(answer.id, answer.error) for answer in received[1::2]] == [("good", "")] * len(UNREADABLE)
    assert [answer.error.rpartition("[")[2] for answer in received[::2]] == [f"{reason}]" for _, reason in UNREADABLE]


# Bad files


def check(program: Path, paths: list[Path]) -> list[tuple[str, str]]:
    """What the server says of each file."""
    done = run(program, "--check", *paths)
    assert done.returncode in (0, 1), done.stderr
    lines = [line.split("\t") for line in done.stdout.splitlines()]
    assert [line[1] for line in lines] == [str(path) for path in paths], done.stderr
    return [(line[0], line[2]) for line in lines]


def test_damaged_files_are_refused(program: Path, file: Path, tmp_path: Path) -> None:
    """A flipped bit or a cut is an error, unless nothing reads it: then the answers are the same."""
    rng = random.Random(0)
    whole = file.read_bytes()
    directory = whole.rindex(b"PK\x05\x06")
    offsets = [rng.randrange(len(whole)) for _ in range(40)]
    offsets += [rng.randrange(directory - 4000, len(whole)) for _ in range(40)] + list(range(directory, len(whole), 2))
    offsets += [at + byte for at in (whole.index(b"PK\x03\x04", 10_000),) for byte in range(0, 30, 2)]
    paths, readable = [], []
    for number, at in enumerate(offsets):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << rng.randrange(8)
        paths.append(tmp_path / f"flipped-{number}-{at}.pt")
        paths[-1].write_bytes(damaged)
    cuts = [0, 1, 22, len(whole) - 1, *(rng.randrange(len(whole)) for _ in range(25))]
    for size in cuts:
        paths.append(tmp_path / f"cut-{size}.pt")
        paths[-1].write_bytes(whole[:size])
    extra = (b"\0", b"PK\5\6" + bytes(18), whole[-22:], whole[-98:])
    longer = [whole + part for part in extra] + [part + whole for part in extra]
    longer += [whole[:-2] + len(part).to_bytes(2, "little") + part for part in extra]
    for number, content in enumerate(longer):
        paths.append(tmp_path / f"longer-{number}.pt")
        paths[-1].write_bytes(content)
    checks = check(program, paths)
    for path, (kind, message) in zip(paths, checks, strict=True):
        if kind == "ok":
            readable.append(path)
        else:
            assert message.endswith("]"), message
    assert not [path for path in readable if not path.name.startswith("flipped")]
    expected = recfx.load(file).serve(GOOD)["output"]
    for path in readable[:5]:
        (answer,) = answers(program, path, [GOOD])
        torch.testing.assert_close(answer.outputs["output"], expected, rtol=1e-6, atol=1e-7)
    assert len(readable) < len(paths) / 2


MANIFESTS = [
    ({}, ""),
    ({"format_version": 4}, "newer_format"),
    ({"format_version": 10**30}, "not_exported"),
    ({"format_version": "1"}, "not_exported"),
    ({"hash_version": 9}, "other_hash"),
    ({"format_version": 0}, "not_exported"),
    ({"hash_version": None}, "other_hash"),
    ({"hash_version": 1.0}, "other_hash"),
    ({"format": "pt2"}, "other_format"),
    ({"format": 3}, "damaged_file"),
    ({"format": "x" * 500}, "damaged_file"),
    ({"portable": 1}, "damaged_file"),
    ({"operators_version": 2.0}, "damaged_file"),
    ({"operators_version": True}, "damaged_file"),
    ({"portable": False, "operators_version": None}, "damaged_file"),
    ({"portable": False, "operators_version": 2**63}, "damaged_file"),
    ({"content_crc32": "00000000"}, "damaged_file"),
    ({"content_crc32": None}, "damaged_file"),
    (None, "not_exported"),
    ("[]", "not_exported"),
    ("{}", "not_exported"),
    ('{"format_version": 1', "not_exported"),
    ('{"format_version": }', "not_exported"),
    ('{"x": "\\', "not_exported"),
    ('{"x": {"format_version": 1}}', "not_exported"),
    ('{"x": ["}", "\\"", {}], "format_version" : 1 , "hash_version":1, "crc32": {}}', ""),
]


def test_files_of_other_versions_and_strange_manifests(program: Path, file: Path, tmp_path: Path) -> None:
    paths = []
    for number, (change, _) in enumerate(MANIFESTS):
        paths.append(tmp_path / f"{number}.pt")
        with zipfile.ZipFile(file) as old, zipfile.ZipFile(paths[-1], "w") as new:
            for name in old.namelist():
                content = old.read(name)
                if name.endswith("recfx.json"):
                    if change is None:
                        continue
                    manifest = {**json.loads(content), **change} if isinstance(change, dict) else change
                    content = (manifest if isinstance(manifest, str) else json.dumps(manifest, indent=1)).encode()
                new.writestr(name, content)
    checks = [(kind, message.rpartition("[")[2]) for kind, message in check(program, paths)]
    assert [kind for kind, _ in checks] == ["error" if reason else "ok" for _, reason in MANIFESTS]
    assert [reason for kind, reason in checks if kind == "error"] == [f"{reason}]" for _, reason in MANIFESTS if reason]


def test_records_that_belong_to_another_file_are_refused(program: Path, file: Path, tmp_path: Path) -> None:
    def of_format_1(change: ChangeRecords) -> ChangeRecords:
        claim = with_manifest(format_version=1, content_crc32=None, order=None)
        return lambda records: claim(change(records))

    changes: list[ChangeRecords] = [
        dict,
        of_format_1(dict),
        swapped,
        with_another,
        without_one,
        of_format_1(with_another),
    ]
    changes += [with_manifest(format_version=1), with_manifest(format_version=1, content_crc32=None)]
    changes += [with_manifest(format_version=1, content_crc32=None, order=None, crc32=None)]
    for number, change in enumerate(changes):
        rewrite(file, tmp_path / f"{number}.pt", change)
    results = check(program, sorted(tmp_path.iterdir()))
    assert [kind for kind, _ in results] == ["ok", *["error"] * 8], results
    assert all(message.endswith("[damaged_file]") for _, message in results[1:])


@pytest.mark.parametrize("name", names("torchscript", "own_operators", "device"))
def test_files_that_earlier_versions_wrote_are_served(program: Path, name: str, tmp_path: Path) -> None:
    if facts_of(name)["kind"] == "own_operators" and not library.load():
        pytest.skip("there is no C++ library")
    options = ("--library", str(library.loaded_path())) if facts_of(name)["kind"] == "own_operators" else ()
    calls, path = calls_of(facts_of(name)["calls"]), unpack(name, tmp_path)
    received = answers(program, path, [by_name(recfx.Sample(*arguments)) for arguments, _ in calls], *options)
    for answer, (_, expected) in zip(received, calls, strict=True):
        assert answer.version == version_of(path)
        torch.testing.assert_close(answer.outputs["output"], expected, rtol=1e-5, atol=1e-6)


def test_what_is_no_file_of_recfx(program: Path, tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "other.pt")
    (tmp_path / "text.pt").write_text("PK\5\6" * 100)
    with zipfile.ZipFile(tmp_path / "empty.zip", "w"):
        pass
    paths = [tmp_path / name for name in ("other.pt", "text.pt", "empty.zip", "nowhere.pt")] + [tmp_path]
    reasons = ["not_exported", "damaged_file", "damaged_file", "no_file", "no_file"]
    assert [message.rsplit("[")[-1][:-1] for _, message in check(program, paths)] == reasons
    done = run(program, tmp_path / "nowhere.pt")
    assert (done.returncode, done.stdout) == (1, "")
    assert "[no_file]" in done.stderr
    done = run(program, tmp_path / "other.pt", "--fbgemm", tmp_path)
    assert done.returncode == 1
    assert "[no_library]" in done.stderr

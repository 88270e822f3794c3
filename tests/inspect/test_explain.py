"""What the report says of real models, before and after conversion."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingCollection, EmbeddingConfig

from recfx import HashConfig, HashEmbeddingBagCollection, convert, plan
from recfx.errors import Diagnostic
from recfx.inspect.explain import explain
from recfx.inspect.report_data import HashingReport
from recfx.planner.topology import npu_topology
from tests.builders.optimizers import attach
from tests.inspect.models import Towers, Wrapped, batch, collection, config, dlrm, towers

DLRM_PATH = "sparse_arch.embedding_bag_collection"


def codes(reasons: tuple[Diagnostic, ...]) -> list[tuple[str, str, str]]:
    return [(reason.severity, reason.code, reason.path) for reason in reasons]


def test_dlrm_before_conversion() -> None:
    model, sample = dlrm()
    report = explain(model, sample)
    (entry,) = report.collections
    assert report.ok
    assert report.reasons == ()
    assert report.verification.ok is True
    assert (entry.paths, entry.kind, entry.status) == ((DLRM_PATH,), "EmbeddingBagCollection", "convertible")
    assert entry.found == "traced"
    assert entry.file.endswith("torchrec/models/dlrm.py")
    assert "self.embedding_bag_collection(" in _line(entry.file, entry.line)
    assert (entry.is_weighted, entry.device) == (False, "cpu")
    assert "hash_lookup" not in entry.graph
    first, second = entry.tables
    assert (first.name, first.features, first.embedding_names) == ("t0", ("f0",), ("f0",))
    assert (first.rows, first.dim, first.pooling, first.dtype, first.device) == (100, 8, "SUM", "float32", "cpu")
    assert (first.bytes, second.bytes) == (100 * 8 * 4, 50 * 8 * 4)
    assert second.pooling == "MEAN"
    assert second.hashing == HashingReport("adopted", rows=50, dense_rows=50)
    assert (first.kernel, first.kernels_passed_over) == ("cpu", ())
    assert first.optimizer == "none: gradients to weight.grad"


def _line(file: str, line: int) -> str:
    with open(file) as source:
        return source.readlines()[line - 1]


def test_dlrm_after_conversion_with_an_index() -> None:
    model, sample = dlrm()
    converted = convert(model, sample, hashing=HashConfig(dense_rows=0), verify=False)
    converted.train()
    converted(*sample)
    converted.eval()
    converted(sample[0], batch([1, 2, 3, 99, 5, 6, 7, 8]))
    report = explain(converted)
    (entry,) = report.collections
    assert (entry.status, entry.found, entry.kind) == ("converted", "traced", "EmbeddingBagCollection")
    hashing = entry.tables[0].hashing
    assert hashing is not None
    assert (hashing.mode, hashing.rows, hashing.ids_held, hashing.occupancy) == ("index", 100, 4, 0.04)
    assert (hashing.trained["ids_seen"], hashing.evaluated["unseen_answers"], hashing.longest_probe) == (4, 1, 1)
    assert codes(report.reasons) == [
        ("info", "weights_not_used", f"{DLRM_PATH}.embedding_bags.t0"),
        ("info", "unseen_answers", f"{DLRM_PATH}.embedding_bags.t0"),
        ("info", "weights_not_used", f"{DLRM_PATH}.embedding_bags.t1"),
    ]
    assert report.ok
    nodes = [(node.kind, str(node.bytes), node.made_by, node.kernel) for node in entry.nodes]
    assert nodes == [
        ("select_features", "8*B*(L_f0 + L_f1)", "expand_collection", ""),
        ("hash_lookup", "64*B", "fuse_hash_lookup", "cpu"),
        ("mean_divide", "64*B", "batch_lookups", ""),
        ("keyed_tensor", "64*B", "expand_collection", ""),
    ]
    assert [(one.by, one.code) for one in entry.declined] == [("elide_hash", "has_index")] * 2
    assert report.verification.text == "not run: verify=False"


def test_verification_is_reported() -> None:
    model, sample = dlrm()
    report = explain(convert(model, sample))
    assert report.verification.ok is True
    assert report.verification.text.startswith("verification: ok")
    for late in (explain(convert(model)), explain(convert(model), sample)):
        assert late.verification.text == "not run: converted without a sample"


def test_statuses_aliases_and_reasons() -> None:
    model, sample = towers()
    report = explain(model, sample)
    assert [(entry.paths, entry.status, entry.found) for entry in report.collections] == [
        (("user", "item"), "convertible", "traced"),
        (("own",), "refused", "traced"),
        (("unused",), "convertible", "never called"),
        (("sequence",), "convertible", "traced"),
    ]
    assert codes(report.reasons) == [("error", "own_forward", "own"), ("warning", "never_called", "unused")]
    assert not report.ok
    own, sequence = report.collections[1], report.collections[3]
    assert own.why is not None
    assert own.why.what_to_do
    assert [(table.name, table.bytes, table.hashing, table.kernel) for table in own.tables] == [("t0", 3200, None, "")]
    assert [(table.name, table.pooling, table.bytes) for table in sequence.tables] == [("s", "NONE", 160)]
    converted = convert(model, sample, on_unsupported="keep", verify=False)
    after = explain(converted)
    assert [(entry.paths, entry.status, entry.found) for entry in after.collections] == [
        (("user", "item"), "converted", "traced"),
        (("own",), "refused", "traced"),
        (("unused",), "converted", "never called"),
        (("sequence",), "converted", "traced"),
    ]
    assert codes(after.reasons) == codes(report.reasons)


@pytest.mark.parametrize("model", [nn.Linear(2, 2), Wrapped(nn.Identity())])
def test_no_collection_is_an_error_in_the_report(model: nn.Module) -> None:
    report = explain(model)
    assert not report.ok
    assert codes(report.reasons) == [("error", "no_collection", "")]
    assert report.collections == ()


def test_only_collections_that_are_not_pooled() -> None:
    table = EmbeddingConfig(name="s", embedding_dim=4, num_embeddings=10, feature_names=["f"])
    report = explain(Wrapped(EmbeddingCollection(tables=[table])))
    assert report.reasons == ()
    assert report.ok
    (entry,) = report.collections
    nodes = [(node.kind, tuple(map(str, node.shape)), str(node.bytes)) for node in entry.nodes]
    assert nodes == [
        ("select_features", ("B*L_f",), "8*B*L_f"),
        ("lookup", ("B*L_f", "4"), "16*B*L_f"),
        ("jagged_dict", ("B*L_f", "4"), "16*B*L_f"),
    ]


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Wrapped(collection())
        self.branch = _Branch(self.inner)

    def forward(self, features: object) -> torch.Tensor:
        return self.branch(features)


class _Branch(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, features: object) -> torch.Tensor:
        pooled: torch.Tensor = self.inner(features)
        return pooled if pooled.sum() > 0 else -pooled


def test_rollbacks_are_reported() -> None:
    model, sample = Branching(), (batch([1, 2, 3, 4]),)
    for report in (explain(model, sample), explain(convert(model, sample, verify=False))):
        assert codes(report.reasons) == [("info", "untraceable", "branch")]
        assert "TraceError" in report.reasons[0].message
        assert report.collections[0].found == "walked"


def test_root_collection() -> None:
    root, sample = collection(), (batch([1, 2, 3, 4]),)
    for model in (root, convert(root), convert(root, sample, verify=False, whole_graph=True)):
        (entry,) = explain(model, sample).collections
        assert (entry.paths, entry.found) == (("",), "traced")
        assert entry.nodes[0].name == "ebc_select_features"


def test_built_directly() -> None:
    model = Wrapped(HashEmbeddingBagCollection(tables=[config(0)]))
    report = explain(model)
    (entry,) = report.collections
    assert (entry.status, entry.kind) == ("converted", "HashEmbeddingBagCollection")
    assert entry.tables[0].hashing is not None
    assert entry.tables[0].hashing.mode == "index"
    assert report.reasons == ()  # fresh tables: there are no weights that are not used
    assert report.verification.text == "not run: built directly"


def test_wrappers_whole_graph_and_copies() -> None:
    model, sample = dlrm()
    converted = convert(model, sample, verify=False)
    whole = convert(model, sample, verify=False, whole_graph=True)
    for wrapped, path in (
        (torch.compile(converted), DLRM_PATH),
        (convert(torch.compile(model), sample, verify=False), DLRM_PATH),
        (convert(torch.compile(model), sample, verify=False)._orig_mod, DLRM_PATH),
        (Wrapped(torch.compile(converted)), f"inner.{DLRM_PATH}"),
        (whole, DLRM_PATH),
        (copy.deepcopy(converted), DLRM_PATH),
        (pickle.loads(pickle.dumps(converted)), DLRM_PATH),
    ):
        (entry,) = explain(wrapped, sample).collections
        assert (entry.paths, entry.status, entry.found) == ((path,), "converted", "traced")
        assert (entry.kind, entry.line > 0) == ("EmbeddingBagCollection", True)
        assert entry.tables[0].kernel == "cpu"


@pytest.fixture
def watched() -> tuple[nn.Module, list[object]]:
    """A model with an optimizer in backward and a child in another mode, and everything that must stay."""
    model = Towers()
    model.user.extra = nn.Dropout()
    model.scripted = torch.jit.script(nn.Dropout())
    attach(model.user, torch.optim.Adam)
    model.user.extra.eval()
    return model, _everything(model)


def _everything(model: nn.Module) -> list[object]:
    optimizers = [weight._in_backward_optimizers[0] for weight in model.user.parameters()]  # type: ignore[union-attr]
    return [
        [(name, id(module), module.training, sorted(module.__dict__)) for name, module in model.named_modules()],
        [(name, id(weight), weight.data_ptr(), weight._version) for name, weight in model.named_parameters()],
        [len(optimizer.state) for optimizer in optimizers],
        torch.get_rng_state().tolist(),
    ]


def test_nothing_changes(watched: tuple[nn.Module, list[object]]) -> None:
    model, before = watched
    explain(model, (batch([1, 2, 3, 4]),))
    assert _everything(model) == before
    assert all(type(model.get_submodule(name)) is EmbeddingBagCollection for name in ("user", "unused"))


def test_nodes_of_a_plan_are_those_of_the_devices_that_it_was_made_for() -> None:
    model = Towers()
    report = explain(model, plan=plan(model, npu_topology(world_size=2)))
    nodes = [node for one in report.collections for node in one.nodes]
    assert {node.device for node in nodes if node.kind == "lookup"} == {"npu"}
    pooled = [node for one in report.collections if one.path != "sequence" for node in one.nodes]
    assert {node.kernel for node in pooled if node.kind == "lookup"} == {"npu[vendor]"}
    assert "input_dist_wait" in {node.kind for node in nodes}

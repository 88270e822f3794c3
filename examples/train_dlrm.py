"""Train TorchRec's own DLRM on raw 64-bit ids, without touching the model.

    python examples/train_dlrm.py                       # generated rows, about a minute
    python examples/train_dlrm.py --quick               # smaller, as CI runs it
    python examples/train_dlrm.py --data day_0.tsv      # the real Criteo log
    python examples/train_dlrm.py --device npu:0        # or cuda:0; nothing else changes

A standard DLRM cannot take these ids: its tables have rows 0, 1, 2, ... One call converts it. The script then trains
it, shows what was rewritten, checks it against the original, saves and loads it, and undoes the conversion.
"""

from __future__ import annotations

import argparse
import copy
import logging
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from criteo import CATEGORICAL, DENSE, BadRows, Rows, generate, read
from processes import find_device
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics.functional.classification import binary_auroc
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from tqdm import tqdm

import recfx

EVALUATION_BATCH = 4096
LOG_EVERY = 50
HELD_BACK = 0.1
SIZES = {
    "full": {"steps": 1000, "batch_size": 512, "rows": 30_000, "dim": 16},
    "quick": {"steps": 250, "batch_size": 512, "rows": 10_000, "dim": 16},
    "smoke": {"steps": 8, "batch_size": 64, "rows": 2000, "dim": 8},
}


def main() -> int:
    options = parse_arguments()
    torch.manual_seed(0)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)

    section("1. The rows", "raw ids: any 64 bits, not mapped to rows of a table")
    training, held_back = load_rows(options)

    section("2. The model", "torchrec.models.dlrm.DLRM and its EmbeddingBagCollection, unchanged")
    original = build_dlrm(options)
    collection = original.sparse_arch.embedding_bag_collection
    print(f"{type(original).__module__}.{type(original).__name__} with {type(collection).__name__}:")
    print(f"{len(CATEGORICAL)} tables of {options.rows:,} rows, dim {options.dim}; row-wise Adagrad in their backward")

    section("3. recfx.convert", "explicit nodes and one index per table; parameters stay the same objects")
    begin = time.perf_counter()
    model = recfx.convert(original, sample=sample_of(training, options), hashing=recfx.HashConfig.raw_ids())
    print("model = recfx.convert(model, sample=(dense, kjt), hashing=recfx.HashConfig.raw_ids())")
    print(f"done and checked against the original in {time.perf_counter() - begin:.1f} s:")
    print(f"the collection is now a {type(model.sparse_arch.embedding_bag_collection).__name__}")

    section("4. Training", "a new id gets a row when it is first seen; the tables' optimizer runs inside backward")
    untrained = copy.deepcopy(model)  # otherwise the report would count the ids without rows that it reads now
    before = auc(held_back, predict(untrained, held_back, options))
    train(model, training, options)
    trained = predict(model, held_back, options)
    after = auc(held_back, trained)
    print(f"AUC on {len(held_back):,} held-back rows: {before:.4f} before, {after:.4f} after {options.steps:,} steps")

    section("5. recfx.explain", "what was converted, how ids become rows, which kernel was chosen and why")
    print(recfx.explain(model))

    section("6. recfx.verify", "the trained model against the original, which gets rows instead of ids")
    report = recfx.verify(original, model, sample_of(training, options))
    print(report)

    section("7. A checkpoint", "a plain state_dict; the indexes are in it")
    loaded = save_and_load(model, options)
    again = predict(loaded, held_back, options)
    print(f"a freshly built and converted model, loaded: AUC {auc(held_back, again):.4f}")

    section("8. recfx.unconvert", "the plain DLRM again, and the map from ids to rows that it needs")
    plain, mapping = recfx.unconvert(model, with_mapping=True)
    by_rows = predict(plain, to_rows(held_back, mapping), options)
    print(f"the collection is an {type(plain.sparse_arch.embedding_bag_collection).__name__} again,")
    known = sum(len(ids) for ids, _ in mapping.values())
    print(f"and the {known:,} ids of {len(mapping)} tables are mapped to rows before they reach it")
    difference = float((trained - by_rows).abs().max())

    section("Checks")
    passed = [
        check("the trained model agrees with the original model (recfx.verify)", report.ok),
        check("the loaded model predicts the same, bit for bit", torch.equal(trained, again)),
        check(
            f"the plain model predicts the same from mapped ids (largest difference {difference:.1e})",
            torch.allclose(trained, by_rows, rtol=1e-5, atol=1e-6),
        ),
    ]
    if options.learns:
        passed.append(check(f"it has learned: AUC {after:.4f} is above 0.7", after > 0.7))
    if options.device.type == "cpu":
        print("\nAll of this ran on the CPU of this machine; nothing ran on an NPU.")
    return 0 if all(passed) else 1


def build_dlrm(options: argparse.Namespace) -> DLRM:
    """The user's model, which knows nothing about recfx."""
    collection = EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=f"table_{feature}",
                num_embeddings=options.rows,
                embedding_dim=options.dim,
                feature_names=[feature],
                weight_init_min=-0.01,
                weight_init_max=0.01,
            )
            for feature in CATEGORICAL
        ]
    )
    model = DLRM(
        embedding_bag_collection=collection,
        dense_in_features=len(DENSE),
        dense_arch_layer_sizes=[64, options.dim],
        over_arch_layer_sizes=[64, 1],
    ).to(options.device)
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": 0.05})
    return model


def sample_of(rows: Rows, options: argparse.Namespace) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """One small call of the model."""
    return rows[:64].model_input(options.device)


def train(model: DLRM, training: Rows, options: argparse.Namespace) -> None:
    """The usual loop: Adam for the dense part, while the tables take their own step inside ``backward``."""
    optimizer = torch.optim.Adam([*model.dense_arch.parameters(), *model.over_arch.parameters()], lr=1e-3)
    model.train()
    watched, health = recfx.monitor(model), dict[str, float]()
    batches = training.shuffled_batches(options.batch_size, options.steps)
    often = 0.2 if sys.stderr.isatty() else 5.0
    bar = tqdm(batches, total=options.steps, unit="step", desc="training", mininterval=often)
    for step, batch in enumerate(bar, start=1):
        logits = model(*batch.model_input(options.device)).squeeze(-1)
        loss = binary_cross_entropy_with_logits(logits, batch.labels.to(options.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % LOG_EVERY == 0 or step == options.steps:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
            health = watched.scalars()  # watched.log(writer, step) hands them to TensorBoard
    speed = options.steps * len(batch) / bar.format_dict["elapsed"]
    print(f"{speed:,.0f} samples/s, {torch.get_num_threads()} threads, batches of {len(batch):,}")
    show_fullest(health)


def show_fullest(health: dict[str, float]) -> None:
    """The scalars of the fullest table, in the last interval of training."""
    by_table: dict[str, dict[str, float]] = {}
    for tag, value in health.items():
        table, _, scalar = tag.rpartition("/")
        by_table.setdefault(table, {})[scalar] = value
    fullest = max(by_table, key=lambda table: by_table[table]["worst_bucket"])
    print(f"recfx.monitor, fullest table: {fullest}")
    print(f"  {', '.join(f'{scalar} {value:.3g}' for scalar, value in by_table[fullest].items())}")


@torch.no_grad()
def predict(model: Any, rows: Rows, options: argparse.Namespace) -> torch.Tensor:
    """Click probabilities ``[n]``, on the CPU."""
    model.eval()
    logits = [model(*batch.model_input(options.device)) for batch in rows.batches(EVALUATION_BATCH)]
    return torch.cat(logits).squeeze(-1).sigmoid().cpu()


def auc(rows: Rows, predictions: torch.Tensor) -> float:
    """How often a click is ranked above a non-click."""
    return float(binary_auroc(predictions, rows.labels.long()))


def to_rows(batch: Rows, mapping: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Rows:
    """Map ids to rows by hand, as serving the plain model requires; ids without a row are left out of their bags."""
    columns = []
    for feature, ids in zip(CATEGORICAL, batch.ids.t().tolist(), strict=True):
        known, rows = mapping[f"table_{feature}"]
        row_of = dict(zip(known.tolist(), rows.tolist(), strict=True))
        columns.append(torch.tensor([row_of.get(id_, -1) for id_ in ids]))
    rows_of_ids = torch.stack(columns, dim=1)
    return replace(batch, ids=rows_of_ids, present=batch.present & (rows_of_ids >= 0))


def save_and_load(model: DLRM, options: argparse.Namespace) -> DLRM:
    """Save, build everything anew as another process would, and load."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dlrm.pt"
        torch.save(model.state_dict(), path)
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB")
        fresh = recfx.convert(build_dlrm(options), hashing=recfx.HashConfig.raw_ids())
        fresh.load_state_dict(torch.load(path))
    return fresh


def load_rows(options: argparse.Namespace) -> tuple[Rows, Rows]:
    """Rows for one epoch of training, and a tenth more, which is held back from it."""
    count = int(options.steps * options.batch_size / (1 - HELD_BACK)) + 1
    if options.data is not None:
        rows = read(options.data, count)
        print(f"{len(rows):,} rows from {options.data.name}")
        if len(rows) < 10_000:
            print("(far too few to measure quality: this shows the format, not a result)")
    else:
        rows = generate(count, options.most_ids)
        print(f"{len(rows):,} generated rows in the format of Criteo's log: ids follow a power law,")
        print("and each raw id has a hidden effect on the click that the model has to find")
    border = max(1, int(len(rows) * (1 - HELD_BACK)))
    training, held_back = rows[:border], rows[border:]
    distinct = [len(ids[present].unique()) for ids, present in zip(training.ids.t(), training.present.t(), strict=True)]
    print(f"{len(training):,} to train on, {len(held_back):,} held back; {float(training.labels.mean()):.0%} clicks")
    print(f"{len(DENSE)} dense and {len(CATEGORICAL)} categorical features")
    print(f"of {min(distinct):,} to {max(distinct):,} distinct ids each")
    print(f"ids of the first row: ..., {', '.join(map(str, training.ids[0, -3:].tolist()))}")
    return training, held_back


def section(title: str, explanation: str = "") -> None:
    print(f"\n\n== {title} {'=' * max(3, 96 - len(title))}")
    if explanation:
        print(f"-- {explanation}")
    print(flush=True)


def check(what: str, passed: bool) -> bool:
    print(f"{'ok  ' if passed else 'FAIL'}  {what}")
    return passed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, cuda:0, npu:0 (default %(default)s)")
    parser.add_argument("--data", type=Path, help="a Criteo log: TSV without header, or CSV with one")
    for size, explanation in (("smoke", "a few small steps, only to see that everything runs"), ("quick", "for CI")):
        parser.add_argument(f"--{size}", dest="size", action="store_const", const=size, help=explanation)
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--batch-size", type=int, help="samples a step")
    parser.add_argument("--rows", type=int, help="rows of each table")
    parser.add_argument("--dim", type=int, help="columns of each table")
    options = parser.parse_args()
    options.device = find_device(options.device)
    own_size = any(value is not None for value in (options.steps, options.batch_size, options.rows))
    options.learns = not own_size and options.data is None and options.size != "smoke"
    for name, value in SIZES[options.size or "full"].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    options.most_ids = options.rows * 3 // 5  # room to spare: a table is full when one of its buckets is
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (recfx.TableFullError, recfx.ConversionError) as error:
        advice = "\nHere: --rows gives every table more of them." if "table_full" in str(error) else ""
        sys.exit(f"{error}{advice}")
    except (OSError, BadRows) as error:
        sys.exit(str(error))

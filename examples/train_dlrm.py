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
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from criteo import CATEGORICAL, DENSE, BadRows, Rows, generate, read
from processes import find_device
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.models.dlrm import DLRM
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from tqdm import tqdm

import recfx

EVALUATION_BATCH = 4096
LOG_EVERY = 50
HELD_BACK = 0.1


def main() -> int:
    options = parse_arguments()
    torch.manual_seed(options.seed)
    logging.getLogger("torch.fx").setLevel(logging.ERROR)

    section("1. The rows", "raw ids: any 64 bits, not mapped to rows of a table")
    training, held_back = load_rows(options)
    describe(training, held_back)

    section("2. The model", "torchrec.models.dlrm.DLRM and its EmbeddingBagCollection, unchanged")
    original = build_dlrm(options)
    collection = original.sparse_arch.embedding_bag_collection
    print(f"{type(original).__module__}.{type(original).__name__} with {type(collection).__name__}:")
    print(f"{len(CATEGORICAL)} tables of {options.rows:,} rows, dim {options.dim}; row-wise Adagrad in their backward")

    section("3. recfx.convert", "explicit nodes and one index per table; parameters stay the same objects")
    begin = time.perf_counter()
    model = recfx.convert(original, sample=sample_of(training, options), hashing=recfx.HashConfig(dense_rows=0))
    print("model = recfx.convert(model, sample=(dense, kjt), hashing=recfx.HashConfig(dense_rows=0))")
    print(f"done and checked against the original in {time.perf_counter() - begin:.1f} s:")
    print(f"the collection is now a {type(model.sparse_arch.embedding_bag_collection).__name__}")

    section("4. Training", "a new id gets a row when it is first seen; the tables' optimizer runs inside backward")
    untrained = copy.deepcopy(model)  # otherwise the report would count the ids without rows that it reads now
    before = auc(held_back.labels, predict(untrained, held_back, options))
    seconds, samples, health = train(model, training, options, tensorboard(options))
    trained = predict(model, held_back, options)
    after = auc(held_back.labels, trained)
    print(f"AUC on {len(held_back):,} held-back rows: {before:.4f} before, {after:.4f} after {options.steps:,} steps")
    print(f"{samples / seconds:,.0f} samples/s, {torch.get_num_threads()} threads, batches of {options.batch_size:,}")
    show_health(health)

    section("5. recfx.explain", "what was converted, how ids become rows, which kernel was chosen and why")
    print(recfx.explain(model))

    section("6. recfx.verify", "the trained model against the original, which gets rows instead of ids")
    report = recfx.verify(original, model, sample_of(training, options))
    print(report)

    section("7. A checkpoint", "a plain state_dict; the indexes are in it")
    loaded = save_and_load(model, options)
    again = predict(loaded, held_back, options)
    print(f"a freshly built and converted model, loaded: AUC {auc(held_back.labels, again):.4f}")

    section("8. recfx.unconvert", "the plain DLRM again, and the map from ids to rows that it needs")
    plain, mapping = recfx.unconvert(model, with_mapping=True)
    by_rows = predict(plain, held_back, options, mapping)
    print(f"the collection is an {type(plain.sparse_arch.embedding_bag_collection).__name__} again,")
    known = sum(len(ids) for ids, _ in mapping.values())
    print(f"and the {known:,} ids of {len(mapping)} tables are mapped to rows before they reach it")

    section("Checks")
    passed = [
        check("the trained model agrees with the original model (recfx.verify)", report.ok),
        check("the loaded model predicts the same, bit for bit", torch.equal(trained, again)),
        check(
            "the plain model predicts the same from mapped ids "
            f"(largest difference {float((trained - by_rows).abs().max()):.1e})",
            torch.allclose(trained, by_rows, rtol=1e-5, atol=1e-6),
        ),
    ]
    if options.data is None and not options.own_size:
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
    apply_optimizer_in_backward(RowWiseAdagrad, collection.parameters(), {"lr": options.table_lr})
    return model


def sample_of(rows: Rows, options: argparse.Namespace) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """One small call of the model."""
    return rows[:64].model_input(options.device)


def train(
    model: DLRM, training: Rows, options: argparse.Namespace, writer: Any = None
) -> tuple[float, int, dict[str, float]]:
    """The usual loop: Adam for the dense part, while the tables take their own step inside ``backward``.

    Returns:
        the time in seconds, the number of samples, and the last scalars of ``recfx.monitor``.
    """
    dense_parameters = [*model.dense_arch.parameters(), *model.over_arch.parameters()]
    optimizer = torch.optim.Adam(dense_parameters, lr=options.dense_lr)
    model.train()
    watched, health = recfx.monitor(model), dict[str, float]()
    samples = 0
    batches: Iterable[Rows] = training.shuffled_batches(options.batch_size, options.steps, options.seed)
    bar = tqdm(
        batches, total=options.steps, unit="step", desc="training", mininterval=0.2 if sys.stderr.isatty() else 5.0
    )
    begin = time.perf_counter()
    for step, batch in enumerate(bar):
        logits = model(*batch.model_input(options.device)).squeeze(-1)
        loss = binary_cross_entropy_with_logits(logits, batch.labels.to(options.device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        samples += len(batch)
        if step % 10 == 0:
            bar.set_postfix(loss=f"{loss.item():.4f}", refresh=False)
        if step % LOG_EVERY == LOG_EVERY - 1 or step == options.steps - 1:
            health = watched.scalars()  # watched.log(writer, step) does both
            for name, value in health.items() if writer is not None else ():
                writer.add_scalar(name, value, step)
    return time.perf_counter() - begin, samples, health


def tensorboard(options: argparse.Namespace) -> Any:
    """A ``SummaryWriter``, which needs the package ``tensorboard``; None without ``--tensorboard``."""
    if options.tensorboard is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(options.tensorboard)


def show_health(health: dict[str, float]) -> None:
    """The fullest table, in the last interval of training."""
    fullest = max((tag for tag in health if tag.endswith("/worst_bucket")), key=lambda tag: health[tag])
    table = fullest.removesuffix("/worst_bucket")
    found = {tag.removeprefix(f"{table}/"): value for tag, value in health.items() if tag.startswith(f"{table}/")}
    print(f"recfx.monitor, fullest table: {table}")
    print(f"  {', '.join(f'{name} {value:.3g}' for name, value in found.items())}")


@torch.no_grad()
def predict(
    model: DLRM,
    rows: Rows,
    options: argparse.Namespace,
    mapping: dict[str, tuple[torch.Tensor, torch.Tensor]] | None = None,
) -> torch.Tensor:
    """Click probabilities ``[n]``, on the CPU; with a mapping, from rows of the tables instead of raw ids."""
    model.eval()
    answers = []
    for batch in rows.batches(EVALUATION_BATCH):
        given = batch if mapping is None else to_rows(batch, mapping)
        answers.append(model(*given.model_input(options.device)).squeeze(-1).sigmoid().cpu())
    return torch.cat(answers)


def to_rows(batch: Rows, mapping: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Rows:
    """Map ids to rows by hand, as serving the plain model requires; ids without a row are left out of their bags."""
    rows, present = torch.zeros_like(batch.ids), batch.present.clone()
    for column, feature in enumerate(CATEGORICAL):
        known, row_of = mapping[f"table_{feature}"]
        known, order = known.sort()
        wanted = batch.ids[:, column].contiguous()
        place = torch.searchsorted(known, wanted).clamp(max=max(len(known) - 1, 0))
        found = known[place] == wanted if len(known) else torch.zeros_like(wanted, dtype=torch.bool)
        present[:, column] &= found
        rows[found, column] = row_of[order][place[found]]
    return Rows(batch.labels, batch.dense, rows, present)


def save_and_load(model: DLRM, options: argparse.Namespace) -> DLRM:
    """Save, build everything anew as another process would, and load."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "dlrm.pt"
        torch.save(model.state_dict(), path)
        print(f"{path.name}: {path.stat().st_size / 2**20:.1f} MiB")
        fresh = recfx.convert(build_dlrm(options), hashing=recfx.HashConfig(dense_rows=0))
        fresh.load_state_dict(torch.load(path))
    return fresh


def auc(labels: torch.Tensor, predictions: torch.Tensor) -> float:
    """Area under the ROC curve: how often a click is ranked above a non-click, ties counting half."""
    clicked = labels.numpy() > 0.5
    clicks, others = int(clicked.sum()), int((~clicked).sum())
    if clicks == 0 or others == 0:
        return float("nan")
    _, place, count = np.unique(predictions.numpy(), return_inverse=True, return_counts=True)
    mean_rank = count.cumsum() - (count - 1) / 2  # of equal predictions, counted from 1
    above = mean_rank[place][clicked].sum() - clicks * (clicks + 1) / 2
    return float(above / (clicks * others))


def load_rows(options: argparse.Namespace) -> tuple[Rows, Rows]:
    """Rows to train on, and the last tenth, which is held back from training."""
    if options.data is not None:
        rows = read(options.data, options.most_rows)
        print(f"{len(rows):,} rows from {options.data.name}")
        if len(rows) < 10_000:
            print("(far too few to measure quality: this shows the format, not a result)")
    else:
        rows = generate(options.generated_rows, options.most_ids, options.seed)
        print(f"{len(rows):,} generated rows in the format of Criteo's log: ids follow a power law,")
        print("and each raw id has a hidden effect on the click that the model has to find")
    border = max(1, int(len(rows) * (1 - HELD_BACK)))
    return rows[:border], rows[border:]


def describe(training: Rows, held_back: Rows) -> None:
    distinct = [
        len(training.ids[:, column][training.present[:, column]].unique()) for column in range(len(CATEGORICAL))
    ]
    last = training[:1]
    examples = ", ".join(str(int(value)) for value in last.ids[0, -3:])
    print(f"{len(training):,} to train on, {len(held_back):,} held back; {float(training.labels.mean()):.0%} clicks")
    print(f"{len(DENSE)} dense and {len(CATEGORICAL)} categorical features")
    print(f"of {min(distinct):,} to {max(distinct):,} distinct ids each")
    print(f"ids of the first row: ..., {examples}")


def section(title: str, explanation: str = "") -> None:
    print(f"\n\n== {title} {'=' * max(3, 96 - len(title))}")
    if explanation:
        print(f"-- {explanation}")
    print(flush=True)


def check(what: str, passed: bool) -> bool:
    print(f"{'ok  ' if passed else 'FAIL'}  {what}")
    return passed


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where the model is: cpu, cuda:0, npu:0 (default %(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few small steps, only to see that everything runs")
    parser.add_argument("--quick", action="store_true", help="fewer rows and steps, for CI")
    parser.add_argument("--data", type=Path, help="a Criteo log: TSV without header, or CSV with one")
    parser.add_argument("--most-rows", type=int, default=2_000_000, help="rows to read of it (default %(default)s)")
    parser.add_argument("--steps", type=int, help="training steps (default 1000; quick: 250)")
    parser.add_argument("--batch-size", type=int, help="rows a step (default 512)")
    parser.add_argument("--rows", type=int, help="rows of each table (default 30000; quick: 10000)")
    parser.add_argument("--dim", type=int, default=16, help="columns of each table (default %(default)s)")
    parser.add_argument(
        "--table-lr", type=float, default=0.05, help="learning rate of the tables (default %(default)s)"
    )
    parser.add_argument("--dense-lr", type=float, default=1e-3, help="learning rate of the rest (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tensorboard", metavar="DIR", help="write the scalars of recfx.monitor there")
    options = parser.parse_args()
    options.device = find_device(options.device)
    if options.smoke:
        options.steps, options.batch_size, options.rows, options.dim = 8, 64, 2000, 8
    options.own_size = any(value is not None for value in (options.steps, options.batch_size, options.rows))
    options.steps = options.steps or (250 if options.quick else 1000)
    options.batch_size = options.batch_size or 512
    options.rows = options.rows or (10_000 if options.quick else 30_000)
    options.generated_rows = int(options.steps * options.batch_size / (1 - HELD_BACK)) + 1  # one epoch
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

"""Train TorchRec's own DLRM on raw 64-bit ids in four ways, and take the converted one through its life.

    python examples/train_dlrm.py                       # generated rows
    python examples/train_dlrm.py --quick               # smaller, as CI runs it
    python examples/train_dlrm.py --data u.data         # ratings of MovieLens, or day_0.tsv: the Criteo log
    RECFX_DATA=folder python examples/train_dlrm.py     # folder/ml-100k/ml-100k.inter, if it is there
    python examples/train_dlrm.py --device npu:0        # or cuda:0; nothing else changes

The ways are a plain EmbeddingBagCollection that gets ids modulo its rows, TorchRec's managed collisions, and recfx with
adopted and with hashed tables: the same stream, rows, seeds and optimizers. The hashed model is then drawn, priced,
exported and served, checked against the original, saved and loaded, and converted back.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
from pathlib import Path

import torch
from artifacts import write_all
from contestants import ADMITS_EVERY, ADOPTED, HASHED, MANAGED, PLAIN, Outcome, Tables, run
from criteo import BadRows, Rows, generate, read
from dlrm import ROUND, auc, predict, sample_of, to_rows
from movielens import read_ratings
from processes import find_device

import recfx
from recfx.errors import plural

HELD_BACK = 0.1
SPACE = 5 / 3
"""Rows of a table for each different id: a table is full when one of its buckets is."""
QUANTIZED = 0.02
"""How far a click's logit may move because rows are stored in 8 bits."""
SIZES = {
    "full": {"steps": 500, "batch_size": 512, "ids": 40_000, "dim": 16},
    "quick": {"steps": 200, "batch_size": 512, "ids": 10_000, "dim": 16},
    "smoke": {"steps": 8, "batch_size": 64, "ids": 1200, "dim": 8},
}
RATINGS = (".data", ".inter")
"""Endings of the names of files with ratings of MovieLens."""
LINE = "{:<30}{:>5}{:>12}{:>13}{:>14}{:>20}"


def main() -> int:
    options = parse_arguments()
    for name in ("torch.fx", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)

    section("1. The rows", "raw ids: any 64 bits, not mapped to rows of a table")
    training, held_back = load_rows(options)
    tables, distinct = size_tables(training, options)

    section("2. The same model in four ways", "model = recfx.convert(model, hashing=recfx.HashConfig.raw_ids())")
    print("torchrec.models.dlrm.DLRM in one process; tables train by row-wise Adagrad in backward, the rest by Adam")
    threads = plural(torch.get_num_threads(), "thread")
    print(f"{options.steps:,} steps of {options.batch_size} samples, {threads}, the same seed\n")
    ways = [PLAIN, MANAGED, ADOPTED, HASHED] if options.device.type == "cpu" else [HASHED]
    outcomes = run(ways, tables, training, held_back, options)
    print()
    print(LINE.format("", "ids", "quality", "CPU time", "tables", "ids without a row"))
    print(LINE.format("", "", "(AUC)", "of a step", "and indexes", "of their own").rstrip())
    for way in ways:
        print(
            line(way.name, way.ids, outcomes[way.name], distinct, way is not MANAGED or options.steps >= ADMITS_EVERY)
        )
    if held_back.truth is not None:
        print(LINE.format("the truth", "", f"{auc(held_back, held_back.truth):.4f}", "", "", "").rstrip())
    print(f"\nThe models took turns of {ROUND} steps; the CPU time is that of all threads, the median of these turns.")
    print("Ids were taken modulo the rows beforehand. Managed collisions give rows to new ids", end=" ")
    print(f"every {ADMITS_EVERY} steps", end="")
    print(": so far, no id has one, and there is nothing to measure (-)." if options.steps < ADMITS_EVERY else ".")
    print("Nothing is sharded here; TorchRec's sharded tables train in FBGEMM, which is faster.")
    best = outcomes[HASHED.name]
    model, quality = best.model, best.auc
    print(f"\nAUC of the hashed model on {len(held_back):,} held-back rows: {quality:.4f}")
    show_fullest(recfx.monitor(model).scalars())

    section("3. What comes with it", "open the pages in a browser")
    served = write_all(model, held_back[: options.batch_size], options.out)

    section("4. Checks", "recfx.verify, a checkpoint, and recfx.unconvert")
    trained = predict(model, held_back, options)
    sample = sample_of(training, options)
    fresh = HASHED.convert(HASHED.build(tables, training.dense.shape[1], options), sample)
    with tempfile.TemporaryDirectory() as directory:
        recfx.save_checkpoint(model, directory)
        recfx.load_checkpoint(fresh, directory)
    again = predict(fresh, held_back, options)
    verified = recfx.verify(best.original, model, sample)
    plain, mapping = recfx.unconvert(model, with_mapping=True)
    by_rows = predict(plain, to_rows(held_back, mapping), options)
    known = sum(len(ids) for ids, _ in mapping.values())
    passed = [
        check("the trained model agrees with the original, which gets the rows of its ids (recfx.verify)", verified.ok),
        check(f"the exported int8 file predicts the same (to within {served:.1e})", served < QUANTIZED),
        check(
            f"a new model that loads the checkpoint predicts the same (AUC {auc(held_back, again):.4f})",
            torch.equal(trained, again),
        ),
        check(
            f"converted back, the model predicts the same from the rows of its {known:,} ids"
            f" (to within {float((trained - by_rows).abs().max()):.1e})",
            torch.allclose(trained, by_rows, rtol=1e-5, atol=1e-6),
        ),
        check("every id that was seen in training has a row of its own", best.lost == 0),
    ]
    if ADOPTED.name in outcomes:
        difference = abs(outcomes[ADOPTED.name].auc - outcomes[PLAIN.name].auc)
        passed.append(
            check(
                f"the adopted tables learn what the plain ones learn (they differ by {difference:.4f})",
                difference < 0.005,
            )
        )
    if options.learns:
        passed.append(
            check(f"the hashed model has learned something: its AUC of {quality:.4f} is above 0.7", quality > 0.7)
        )
    if options.device.type == "cpu":
        print("\nAll of this ran on the CPU of this machine; nothing ran on an NPU.")
    return 0 if all(passed) else 1


def line(name: str, ids: str, outcome: Outcome, distinct: int, has_quality: bool) -> str:
    """The line of the table for one way."""
    lost, quality = f"{outcome.lost:,} of {distinct:,}", f"{outcome.auc:.4f}" if has_quality else "-"
    return LINE.format(name, ids, quality, f"{1e3 * outcome.seconds:.1f} ms", f"{outcome.bytes / 2**20:.1f} MiB", lost)


def show_fullest(health: dict[str, float]) -> None:
    """The scalars of the fullest table."""
    by_table: dict[str, dict[str, float]] = {}
    for tag, value in health.items():
        table, _, scalar = tag.rpartition("/")
        by_table.setdefault(table, {})[scalar] = value
    fullest = max(by_table, key=lambda table: by_table[table]["worst_bucket"])
    print(f"recfx.monitor, fullest table: {fullest}")
    known = {scalar: value for scalar, value in by_table[fullest].items() if not math.isnan(value)}
    print(f"  {', '.join(f'{scalar} {value:.3g}' for scalar, value in known.items())}")


def load_rows(options: argparse.Namespace) -> tuple[Rows, Rows]:
    """Rows to train on, and a tenth more, which is held back from it."""
    count = int(options.steps * options.batch_size / (1 - HELD_BACK)) + 1
    if options.data is None:
        rows = generate(count, options.ids)
        print(f"{len(rows):,} generated rows in the format of Criteo's log. Ids follow a power law, and each has a")
        print("hidden effect on the click, which the model has to find. So it is known how good a model can be.")
    else:
        rows = (read_ratings(options.data) if options.data.suffix in RATINGS else read(options.data, count))[:count]
        print(f"{len(rows):,} rows from {options.data.name}")
        if len(rows) < 10_000:
            print("(far too few to judge a model by: they only show that the format is read)")
    border = max(1, int(len(rows) * (1 - HELD_BACK)))
    print(f"{border:,} to train on, {len(rows) - border:,} held back; {float(rows.labels.mean()):.0%} clicks")
    print(f"ids of the first row: ..., {', '.join(map(str, rows.ids[0, -2:].tolist()))}")
    return rows[:border], rows[border:]


def size_tables(training: Rows, options: argparse.Namespace) -> tuple[Tables, int]:
    """The rows of each feature's table, and the number of different ids."""
    distinct = [len(ids[present].unique()) for ids, present in zip(training.ids.t(), training.present.t(), strict=True)]
    rows = [options.rows or max(16, int(count * SPACE)) for count in distinct]
    print(f"{len(distinct)} categorical features of {min(distinct):,} to {max(distinct):,} different ids;")
    print(f"tables of {min(rows):,} to {max(rows):,} rows, dim {options.dim}")
    return dict(zip(training.features, rows, strict=True)), sum(distinct)


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
    parser.add_argument(
        "--data", type=Path, help="ratings of MovieLens (u.data, *.inter), or a Criteo log (TSV, or CSV with a header)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("build/demo"), help="where files are written (default %(default)s)"
    )
    for size, explanation in (("smoke", "a few small steps, only to see that everything runs"), ("quick", "for CI")):
        parser.add_argument(f"--{size}", dest="size", action="store_const", const=size, help=explanation)
    parser.add_argument("--steps", type=int, help="training steps")
    parser.add_argument("--batch-size", type=int, help="samples a step")
    parser.add_argument("--ids", type=int, help="different ids of the largest feature of generated rows")
    parser.add_argument("--rows", type=int, help="rows of each table (default: for each different id, 5/3 of a row)")
    parser.add_argument("--dim", type=int, help="columns of each table")
    options = parser.parse_args()
    options.device = find_device(options.device)
    own_size = any(value is not None for value in (options.steps, options.batch_size, options.ids, options.rows))
    in_folder = Path(os.environ.get("RECFX_DATA", ""), "ml-100k", "ml-100k.inter")
    options.data = options.data or (in_folder if in_folder.is_file() else None)
    is_log = options.data is not None and options.data.suffix not in RATINGS
    options.learns = not own_size and not is_log and options.size != "smoke"
    for name, value in SIZES[options.size or "full"].items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (recfx.TableFullError, recfx.ConversionError) as error:
        advice = "\nHere: --rows gives every table more of them." if "table_full" in str(error) else ""
        sys.exit(f"{error}{advice}")
    except (OSError, BadRows) as error:
        sys.exit(str(error))

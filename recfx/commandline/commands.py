"""The commands of ``python -m recfx``: what each of them takes. What they do is in ``actions.py``, with torch."""

from __future__ import annotations

from argparse import ArgumentTypeError, BooleanOptionalAction
from pathlib import Path

from recfx.commandline.command import Argument, Command
from recfx.commandline.given_file import GivenFile
from recfx.doctor.packages import DEVICES
from recfx.planner.pricing.unknown_batch import BATCH_SIZE, LENGTH

HARDWARE = ("ascend_910b", "h100", "cpu")

_JSON = Argument("--json", action="store_true", help="print JSON instead of text")
_SETTINGS = (
    Argument(
        "--raw-ids", action="store_true", help="convert with HashConfig.raw_ids(): ids may be any 64-bit integers"
    ),
    Argument(
        "--managed-collisions",
        choices=["keep", "convert"],
        default="keep",
        help="convert: also convert TorchRec's managed-collision collections, whose ids keep their rows",
    ),
    Argument(
        "--hashing",
        metavar="FILE",
        type=GivenFile,
        help='settings of HashConfig as JSON: {"on_full": "share"} for all tables, {"tables": {"users": {...}}} for '
        "each of some; with --raw-ids, dense_rows is 0 where it is left out, and without, most settings do nothing",
    ),
    Argument("--backend", metavar="NAME", default="auto", help="kernel target of the lookups (default: auto)"),
    Argument("--device", metavar="DEVICE", help="where the converted model goes (default: it stays where it is)"),
    Argument(
        "--id-range",
        metavar="FEATURE=LOW:HIGH",
        action="append",
        default=[],
        help="the lowest and the highest id of a feature; may be repeated",
    ),
    Argument(
        "--dedup",
        metavar="[TABLE=]VALUE",
        action="append",
        default=[],
        help="whether sharded tables that are not pooled send each different id once: auto, yes, no or, for a table, "
        "the expected share of different ids, such as 0.3; may be repeated",
    ),
)
_CONVERSION = (
    *_SETTINGS,
    Argument("--keep", action="store_true", help="leave collections that cannot be converted as they are"),
)
_RANKS = Argument(
    "--ranks",
    metavar="W",
    type=int,
    help="as rank 0 of so many would have it if recfx.plan sharded it; they need not be there",
)
_OF_SAMPLE = "samples per rank (default: those of the factory's sample, if it returns one; otherwise {})"
_BATCH = Argument("--batch-size", metavar="B", type=int, help=_OF_SAMPLE.format(BATCH_SIZE))
_LENGTHS = Argument(
    "--length",
    metavar="[FEATURE=]L",
    action="append",
    default=[],
    help="mean number of ids per sample, of one feature or of all that are not named; may be repeated (default: that "
    f"of the factory's sample, if it returns one; otherwise {LENGTH:g})",
)
_PLAN = Argument(
    "--plan",
    metavar="FILE",
    type=GivenFile,
    help="as this plan, which the command plan writes, would shard it",
)


def _hardware(help: str) -> Argument:
    return Argument("--hardware", choices=HARDWARE, help=help)


def _device(text: str) -> str:
    """Check the device that an option names; argparse turns the error into a message and exit status 2."""
    kind, _, number = text.partition(":")
    if kind not in DEVICES or not ((number.isascii() and number.isdigit()) or text == kind):
        raise ArgumentTypeError(f"{text!r} is none of {', '.join(DEVICES)}, nor one of them with a number")
    return text


COMMANDS = (
    Command(
        "explain",
        help="what a conversion does, or did, to a model",
        description="Print what a conversion does to a model, or did to one that is converted: what is refused, what "
        "deserves a warning, every collection and table. The exit status is 1 if something is refused.",
        example="explain model.py:make_model --html report.html",
        arguments=(
            _JSON,
            Argument("--html", metavar="FILE", type=GivenFile, help="also write an HTML page"),
            Argument(
                "--tables",
                choices=("groups", "all"),
                default="groups",
                help="one line per group of like tables, or per table",
            ),
            Argument("--whole-graph", action="store_true", help="as a graph of the whole model; needs a sample"),
            Argument(
                "--verify",
                action=BooleanOptionalAction,
                help="compare with the original (default: if there is a sample, and the model is not large)",
            ),
            _PLAN,
            _hardware("what the ranks are (default: CPUs)"),
            _RANKS,
            *_CONVERSION,
        ),
    ),
    Command(
        "graph",
        help="the rewritten graph of each collection",
        description="Print the graph that each collection is rewritten to, one node per line, or what changed between "
        "two passes.",
        example="graph model.py:make_model --diff before lower",
        arguments=(
            _JSON,
            Argument("--collection", metavar="NAME", help="only this one, by its fully qualified name"),
            Argument("--after", metavar="PASS", help="after this pass instead of the last one"),
            Argument(
                "--diff",
                nargs=2,
                metavar="STEP",
                help="what changed between two steps, each the name of a pass, or 'before'; of all collections",
            ),
            *_CONVERSION,
        ),
    ),
    Command(
        "draw",
        help="a picture of the graphs, before and after conversion",
        description="Draw a model's graphs before and after conversion: .html is one page with every pass, what is "
        "known of each node, and a search; .svg is a picture, .dot the same for Graphviz.",
        example="draw model.py:make_model model.html",
        arguments=(
            Argument("file", metavar="FILE", type=GivenFile, help="the file to write: .html, .svg or .dot"),
            _JSON,
            Argument("--whole-graph", action="store_true", help="with the code around collections; needs a sample"),
            _PLAN,
            _hardware("what times are predicted for (default: with --ranks, a CPU; otherwise the typical device)"),
            _RANKS,
            *_CONVERSION,
        ),
    ),
    Command(
        "cost",
        help="what each node costs per step, and its predicted time",
        description="Print what each node of the converted model costs per step: bytes read and written, bytes for "
        "collectives, flops, bytes that stay, and the time that this is predicted to take.",
        example="cost model.py:make_model --batch-size 4096 --length 2 --length watched=50",
        arguments=(
            _JSON,
            _BATCH,
            _LENGTHS,
            _PLAN,
            _hardware("what times are predicted for (default: with --ranks, a CPU; otherwise the typical device)"),
            _RANKS,
            Argument("--eval", action="store_true", help="a step in eval mode, without a backward"),
            Argument("--expressions", action="store_true", help="print expressions in B, W and L_f, and no times"),
            *_CONVERSION,
        ),
    ),
    Command(
        "plan",
        help="write the sharding plan that recfx.plan makes",
        description="Write the sharding plan that recfx.plan makes for ranks that need not be there, as JSON, and "
        "print how it was chosen. The exit status is 1 if no plan fits.",
        example="plan model.py:make_model plan.json --ranks 16 --hardware ascend_910b",
        arguments=(
            Argument("file", metavar="FILE", type=GivenFile, help="the file to write"),
            _JSON,
            Argument("--ranks", metavar="W", type=int, required=True, help="for so many; they need not be there"),
            _hardware("what the ranks are (default: CPUs)"),
            Argument(
                "--batch-size",
                metavar="B",
                type=int,
                default=BATCH_SIZE,
                help="samples per rank (default: %(default)s)",
            ),
            Argument(
                "--constrain",
                metavar="TABLE=TYPE[,TYPE]|FILE",
                type=lambda text: text if "=" in text else GivenFile(text),
                action="append",
                default=[],
                help="the sharding types that a table may have; or a file of TorchRec's ParameterConstraints as JSON, "
                'such as {"users": {"sharding_types": ["row_wise"], "pooling_factors": [20]}}; may be repeated',
            ),
            *_CONVERSION,
        ),
    ),
    Command(
        "compare",
        help="what each of several sharding plans costs per step",
        description="Print what a step takes under each of several sharding plans, which the command plan has written, "
        "side by side, as recfx.compare_plans does. Plans that were made for different hardware need --hardware.",
        example="compare model.py:make_model one.json two.json --batch-size 4096 --length 20",
        arguments=(
            Argument("plans", metavar="FILE", type=GivenFile, nargs="+", help="a plan"),
            _JSON,
            _BATCH,
            _LENGTHS,
            _hardware("what times are predicted for (default: what the plans were made for)"),
            Argument("--ranks", metavar="W", type=int, help="how many ranks the plans are for, if they do not say it"),
            Argument("--eval", action="store_true", help="a step in eval mode, without a backward"),
            *_CONVERSION,
        ),
    ),
    Command(
        "verify",
        help="convert a model, and compare it with the original",
        description="Convert a model and compare it with the original on its sample: outputs, gradients and one "
        "optimizer step, in train and eval mode, at two batch sizes. The exit status is 1 if they differ, or if "
        "nothing could be compared.",
        example="verify model.py:make_model --raw-ids",
        arguments=(
            _JSON,
            *_CONVERSION,
            Argument("--rtol", type=float, default=1e-5, help="relative tolerance (default: %(default)g)"),
            Argument("--atol", type=float, default=1e-6, help="absolute tolerance (default: %(default)g)"),
        ),
    ),
    Command(
        "export",
        help="write a model into a file that a server loads without Python",
        description="Write a model, as it answers in eval mode, into a file that a server loads without Python; with "
        "--checkpoint, what was saved of it. A model that is not converted is converted with these options, which for "
        "a checkpoint are those of the conversion that was saved; without one, a table with --raw-ids knows no id yet. "
        "The file is written only if it answers the sample as the model does; otherwise the exit status is 1.",
        example="export model.py:make_model model.pt --quantize int8",
        arguments=(
            Argument("file", metavar="FILE", type=GivenFile, help="the file to write"),
            _JSON,
            Argument("--checkpoint", metavar="DIR", type=GivenFile, help="export what save_checkpoint saved there"),
            Argument("--submodule", metavar="PATH", default="", help="where the model is in the one that was saved"),
            Argument(
                "--quantize",
                metavar="[TABLE=]FORMAT",
                action="append",
                default=[],
                help="fp16, int8 or int4; may be repeated",
            ),
            Argument("--format", default="torchscript", help="of the file (default: torchscript)"),
            Argument("--not-portable", dest="portable", action="store_false", help="use recfx's own operators"),
            *_SETTINGS,
        ),
    ),
    Command(
        "doctor",
        help="is this machine set up, are the kernels right here, and how fast are they",
        description="Look at what is installed, run every kernel against its reference on the device, train a small "
        "model there, and measure how fast the kernels are. Writes a page and JSON to attach to a bug report. The exit "
        "status is 1 if something is missing or wrong.",
        example="doctor --device npu",
        arguments=(
            _JSON,
            Argument(
                "--device",
                type=_device,
                metavar="DEVICE",
                help="npu, cuda or cpu, perhaps with a number, as in npu:1 (default: the first of these that is here)",
            ),
            Argument("--quick", action="store_true", help="fewer shapes and shorter measurements: a few seconds"),
            Argument(
                "--out",
                metavar="PATH",
                type=Path,
                default=Path(),
                help="a directory, or the path of the two files without its end (default: recfx-doctor here)",
            ),
        ),
        has_factory=False,
    ),
)

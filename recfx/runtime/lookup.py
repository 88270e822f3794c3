"""``lookup``: one table-batched lookup of a group of tables; rows of a bag are pooled, or stay as they are."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, cast

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from recfx.errors import ConversionError, InputError
from recfx.ir.node_kinds import NOT_COMBINED
from recfx.ir.tables import KeyOrder, TableSpec
from recfx.lowering import reference
from recfx.lowering.registry import Choice, IdsToRows, LookupBatch, LookupKernel, LookupSpec, Outputs, select_backend
from recfx.lowering.step.step_once import GradientPart, leaf_gradients, leave_for_step
from recfx.lowering.step.trainable_lookup import TrainableLookup, weight_gradients
from recfx.lowering.step.trained_batch import TrainedBatch
from recfx.optim.attached import number_attached
from recfx.optim.fused_optimizer import CheckedSettings, FusedOptimizer
from recfx.runtime.bags import bags_of_keys, keep_ids, permute_features
from recfx.runtime.base import NodeModule
from recfx.runtime.in_flight import BatchInFlight, guard_backward
from recfx.runtime.late_checks import settle_before_backward
from recfx.runtime.lowered import Lowered
from recfx.runtime.operators import look_up, new_call


class Lookup(NodeModule):
    """Pool the rows of a group of ``tables``, in column order.

    Attributes:
        combine: ``"SUM"`` or ``"MEAN"``, as the kernel pools (SUM if ``mean_divide`` follows); ``"NONE"``: not at all.
        features: the output keys of the whole collection, in the order of the KJT's keys.
    """

    def __init__(self, of: Lowered) -> None:
        super().__init__()
        self.collection, self.is_weighted, self.backend = of.collection.name, of.collection.is_weighted, of.backend
        self.tables, self.combine = of.graph.tables(of.node), str(of.node.kwargs["combine"])
        self.store, tables, features = of.runtime.store, self.tables, of.collection.local_keys
        self.features, self.unpooled = KeyOrder.of(features), self.combine == NOT_COMBINED
        self.table_of_feature = [number for number, table in enumerate(tables) for _ in table.embedding_names]
        # What graphs of torch.compile read if an optimizer is in the backward: see ``Trigger``, and the weights.
        self.leaves, self.detached = list[torch.Tensor](), list[torch.Tensor]()
        keys = [name for table in tables for name in table.embedding_names]
        self._keys, self._names = keys, [table.name for table in tables]
        positions = self.features.positions
        self._positions = None if tuple(keys) == features else [positions[name] for name in keys]
        self._indexed = [table.name for table in tables if table.has_index]
        self._may_read_untrained = any(_may_read_untrained(table) for table in tables)
        self._decided, self._settings = "", CheckedSettings()
        self._choice: Choice | None = None
        for selecting in of.runtime.of("select_features"):
            selecting.lookups.append(self)
        self._own: list[FusedOptimizer] = []  # that the kernel steps with
        if "kernel" in of.node.kwargs:
            self.choose_kernel(str(of.node.kwargs["kernel"]))

    def choose_kernel(self, decided: str = "") -> Choice:
        """Choose the kernel for the tables as they are now (device, dtype, optimizer). ``decided`` is the backend that
        the graph names; ``""`` if it names none. If it is another one than the lookup's own, a pass has decided on it,
        and later calls choose it again.
        """
        decided, choice = decided or self._decided, self.select(self.backend)
        if decided not in ("", choice.backend):
            self._decided, choice = decided, self.select(decided)
        self._choice = choice
        self._own = [optimizer for optimizer in self.spec().optimizers if optimizer is not None]
        return choice

    def select(self, backend: str) -> Choice:
        """What ``choose_kernel`` would choose with this backend, with the same errors; nothing changes."""
        self._check_shapes()
        return select_backend(self.spec(), backend, self.collection)

    def _check_shapes(self) -> None:
        """Check the tables' sizes, which kernels rely on: a table may have been replaced by one of another size."""
        for table in self.tables:
            before, shape = (table.num_embeddings, table.embedding_dim), tuple(self.store.weight(table.name).shape)
            if shape != before:
                raise ConversionError(
                    f"the weight of table {table.name!r} has shape {shape}, but the table was converted with {before}.",
                    reason="table_shape_changed",
                    module_path=self.collection,
                    what_to_do="load weights of the same shape, or convert again.",
                )

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of the tables' rows; None if a parameter is missing."""
        table = self.tables[0]
        bag = self.store.bags._modules.get(table.name)
        if bag is None:  # the table is on another rank, and insert_dist has not run yet
            return table.dtype
        parameter = bag._parameters.get("weight")
        return None if parameter is None else parameter.dtype

    @property
    def optimizer(self) -> str:
        """The optimizer that updates the rows inside the backward; ``""`` if the backward returns gradients."""
        optimizer = self.store.optimizers.get(self.tables[0].name)
        return "" if optimizer is None else optimizer.rule.name

    @property
    def kernel(self) -> str:
        """The backend whose kernel was chosen for the tables as they are now; ``""`` if the next call chooses one."""
        choice = self._choice
        if choice is None:
            return ""
        bags = [self.store.bags[table.name] for table in self.tables]
        weights: list[torch.Tensor] = [weight for bag in bags if (weight := bag._parameters.get("weight")) is not None]
        return "" if choice.stale(weights) else choice.backend

    @property
    def now(self) -> dict[str, str]:
        """What the graph would say about it now: graphs of shards and whole graphs stay when tables change."""
        dtype = str(self.dtype).removeprefix("torch.")
        facts = {"dtype": dtype, "optimizer": self.optimizer, "kernel": self.kernel}
        return {name: value for name, value in facts.items() if value}

    def spec(self) -> LookupSpec:
        return LookupSpec(
            tables=self.tables,
            combine=self.combine,
            is_weighted=self.is_weighted,
            weights=[self.store.weight(table.name) for table in self.tables],
            optimizers=[self.store.optimizers.get(table.name) for table in self.tables],
        )

    def forward(self, features: KeyedJaggedTensor, in_flight: BatchInFlight | None = None) -> torch.Tensor | Outputs:
        """Look up the rows of every table of the group, as ``hash_ids`` returns them: float32 ``[B, sum D]`` or, if
        rows are not pooled, a tuple with ``[n, D]`` for each key. ``in_flight`` is the batch, if its rows must be kept
        until its backwards have run.
        """
        outputs = self._look_up(features)
        self._guard(outputs)
        if in_flight is not None:
            in_flight.watch(outputs)
        return outputs if self.unpooled else outputs[0]

    def _guard(self, outputs: Outputs) -> None:
        settle_before_backward(outputs)
        if self._indexed and torch.is_grad_enabled():
            guard_backward(outputs, self.store.indexes_of(self._indexed), self.collection)

    def not_in_graph(self, trains: bool) -> str:
        if self._indexed and (self.training or trains):
            return "tables of raw ids are in one graph in eval mode only, without gradients (torch.no_grad)."
        if self._indexed and not self.takes_absent:
            return "its kernels do not take ids that have no row."
        weights, choice = self._kernel()
        is_stepped = self._names[0] in self.store.optimizers
        trainable: Any = getattr(choice.kernel, "trainable", None)
        if trainable is None and (is_stepped or trains):
            return f"the kernels of {choice.backend} have no backward that a graph can call."
        self.leaves = [one.trigger.leaf for one in trainable.once.triggers(weights)] if is_stepped else []
        self.detached = [weight.detach() for weight in weights] if is_stepped else []
        for weight in self.detached:
            torch._dynamo.mark_static_address(weight, guard=False)
        return ""

    def in_graph(
        self, features: KeyedJaggedTensor, in_flight: None = None, node: NodeModule | None = None
    ) -> torch.Tensor | Outputs:
        """``forward``; ``node`` is the one that does it, from raw ids, if another one does."""
        lengths: list[int] = []
        weights, scale = self.weights_now(), None
        if self.unpooled:
            values, lengths = self._rows_of_keys(features)
        else:
            if self._positions is not None:
                features = bags_of_keys(features, self._positions, self._keys)
            values, scale = features.values(), features.weights_or_none()
        list(map(number_attached, weights))  # so that a change makes another graph
        trains = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)
        leaves = self.leaves if trains else []
        if self.leaves:  # whose gradients stand for those of the weights, which autograd must not reach
            weights = self.detached
        batch = values, features.offsets(), scale, lengths, features.stride()
        outputs: list[torch.Tensor] = look_up(*batch, weights, leaves, new_call(self if node is None else node))
        return tuple(outputs) if self.unpooled else outputs[0]

    def weights_now(self) -> list[torch.Tensor]:
        return self.store.weights(self._names)

    def look_up(
        self, ids: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None, lengths: list[int], size: int,
        weights: list[torch.Tensor], leaves: list[torch.Tensor],
    ) -> list[torch.Tensor]:  # fmt: skip
        with torch.set_grad_enabled(bool(leaves)):  # for what it checks
            own, choice = self._kernel()
        places, own_places, detached = ([one.data_ptr() for one in of] for of in (weights, own, self.detached))
        if detached and places == detached:
            weights = own
            if places != own_places:  # the tables have moved, such as to huge pages
                self.detached = [weight.detach() for weight in own]
        elif leaves and places != own_places:
            raise self._replaced(self._names[0])
        self._must_move(ids)
        batch = self._trained(ids, offsets, scale, lengths, weights)
        size = 1 if self.unpooled else size
        return list(choice.kernel(weights, LookupBatch(batch.values, batch.offsets, batch.scale, size, batch.lengths)))

    def look_up_backward(
        self, ids: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None, lengths: list[int],
        gradients: Sequence[torch.Tensor | None], needed: list[bool], steps: bool, read: list[torch.Tensor],
    ) -> list[torch.Tensor]:  # fmt: skip
        trainable: TrainableLookup = cast(Any, self._kernel()[1].kernel).trainable
        weights, found = self.weights_now(), list[torch.Tensor]()
        if steps:  # a compiled graph uses the memory of its tensors again
            ids, scale = ids.clone(), None if scale is None else scale.clone()
            offsets, gradients = offsets.clone(), [None if one is None else one.clone() for one in gradients]
        batch = self._trained(ids, offsets, scale, lengths, weights)
        given = tuple(None if one is None else one.resolve_neg().float().contiguous() for one in gradients)
        if read and given[0] is not None:
            found = [trainable.backward.scale_gradient(replace(batch, weights=read), given[0]).to(ids.device)]
        if not steps:
            computed = weight_gradients(trainable.backward, batch, given, needed)
            return found + [gradient for gradient in computed if gradient is not None]
        triggers = trainable.once.triggers(weights)
        part = GradientPart(trainable.once, trainable.backward, batch, given)
        kept: list[object] = []
        torch.autograd.Variable._execution_engine.queue_callback(kept.clear)  # it lives until the pass ends or fails
        leave_for_step(triggers, kept, part)
        return found + [gradient.clone() for gradient in leaf_gradients(triggers)]

    def _trained(
        self, ids: torch.Tensor, offsets: torch.Tensor, scale: torch.Tensor | None, lengths: list[int],
        weights: list[torch.Tensor],
    ) -> TrainedBatch:  # fmt: skip
        """A batch where the tables are."""
        device = weights[0].device
        if self.unpooled:
            offsets = _one_bag_per_key(ids, lengths).offsets
        scale = None if scale is None else scale.to(device, torch.float32)
        return TrainedBatch(
            weights, ids.to(device, torch.int64), offsets.to(device, torch.int64), scale, tuple(lengths)
        )

    def _look_up(self, features: KeyedJaggedTensor) -> Outputs:
        if self._must_move(features.values()):
            features.offsets()  # computed on the host, and copied along
            features = features.to(self.store.weight(self.tables[0].name).device)
        if self.unpooled:
            return self._read_rows(features)
        if self._positions is not None:
            features = permute_features(features, self._positions, self._keys)
        if self._may_read_untrained and not features.values().is_meta and bool((features.values() < -1).any()):
            return (self._pool_partly_trained(features),)
        return self._call(self._batch(features))

    def _must_move(self, values: torch.Tensor) -> bool:
        """Whether the batch was hashed on the host and is looked up elsewhere."""
        device, batch_device = self.store.weight(self.tables[0].name).device, values.device
        if batch_device.type == "cpu" and device.type != "cpu":
            return True
        if batch_device != device:
            what_to_do = "pass a batch with data; for shapes alone, put the model on meta as well."
            if not values.is_meta:
                what_to_do = f"move the batch to {device}, or leave it on the CPU; or move the model to {batch_device}."
            raise InputError(
                f"the batch is on {batch_device}, but table {self.tables[0].name!r} is on {device}.",
                reason="several_devices",
                module_path=self.collection,
                what_to_do=what_to_do,
            )
        return False

    def _call(self, batch: LookupBatch) -> Outputs:
        weights, choice = self._kernel()
        kernel = self._plain_kernel() if _inside_torch_func() else choice.kernel
        return kernel(weights, batch)

    def _read_rows(self, features: KeyedJaggedTensor) -> Outputs:
        """The rows as they are, by key. The ids of a feature are one bag, whatever its number of samples is."""
        values, lengths = self._rows_of_keys(features)
        batch = _one_bag_per_key(values, lengths)
        if not self._may_read_untrained or values.is_meta or not bool((values < -1).any()):
            return self._call(batch)
        untrained = values < -1
        with torch.no_grad():
            read = self._call(replace(batch, values=torch.where(untrained, -values - 2, -1)))
        return tuple(map(torch.add, self._call(replace(batch, values=torch.where(untrained, -1, values))), read))

    def _rows_of_keys(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, list[int]]:
        """The rows of the lookup's own keys, one after the other, and how many each has."""
        values, lengths = features.values(), features.length_per_key()
        if self._positions is not None:
            by_key = values.split(lengths)
            values = torch.cat([by_key[position] for position in self._positions])
            lengths = [lengths[position] for position in self._positions]
        return values, lengths

    def _plain_kernel(self) -> LookupKernel:
        """A kernel of torch's own operators, without a fused step, for torch.func, which returns gradients."""
        spec = self.spec()
        return reference.build(replace(spec, optimizers=[None] * len(spec.weights)))

    @property
    def has_finding_kernel(self) -> bool:
        return self._choice is not None and self._choice.finding is not None

    @property
    def takes_absent(self) -> bool:
        """Whether rows may be -1, which add nothing to their bags."""
        return self.unpooled or (self._kernel()[1].takes_absent and not _inside_torch_func())

    @property
    def takes_masked(self) -> bool:
        """Whether it reads no id that is in no bag, and need not know how many ids each key has."""
        choice = self._choice
        takes_masked = choice is not None and choice.takes_masked and not _inside_torch_func()
        return takes_masked and self.combine != NOT_COMBINED and self._positions is None

    def pool_ids(self, features: KeyedJaggedTensor, ids_to_rows: IdsToRows) -> torch.Tensor | Outputs | None:
        """Do what ``forward`` does, from raw ids, with a kernel that finds their rows itself; for lookups that do not
        permute keys. Returns None if there is no such kernel for the tables as they are now, or it must not run.
        """
        weights, choice = self._kernel()
        if choice.finding is None or _inside_torch_func():
            return None
        outputs = choice.finding(weights, self._batch(features), ids_to_rows)
        self._guard(outputs)
        return outputs if self.unpooled else outputs[0]

    def _kernel(self) -> tuple[list[torch.Tensor], Choice]:
        choice = self._choice
        weights = self.store.weights(self._names)
        fits = self.store.graph_fits
        # Lookups of shards and of whole graphs choose again, or refuse, by themselves: their graphs stay as they are.
        if choice is None or (not fits and choice.stale(weights)):
            choice = self.choose_kernel()
        if self.store.optimizers:
            if not fits:
                self.store.refuse_gradient_hooks(self._names, self.collection)
            if torch.is_grad_enabled():
                self._refuse_changed_settings()
                if not fits:
                    self._refuse_other_tensors(weights)
        return weights, choice

    def _refuse_changed_settings(self) -> None:
        optimizers = self.store.optimizers
        for position, changed in self._settings.changed(self._own):
            table = [table for table in self._names if table in optimizers][position]
            raise ConversionError(
                f"the optimizer of table {table!r} was given {changed} after the conversion, which has no fused form.",
                reason="optimizer_setting_changed",
                module_path=self.collection,
                what_to_do="leave it at its default; or unconvert the model, which trains by the dense optimizer.",
            )

    def _refuse_other_tensors(self, weights: list[torch.Tensor]) -> None:
        """Raise if a tensor replaces a parameter; as with hooks, a collection switches to the dense lookup before."""
        for table in self.store.replaced(self._names, weights):
            raise self._replaced(table)

    def _replaced(self, table: str) -> ConversionError:
        return ConversionError(
            f"another tensor has replaced the weight of table {table!r} (through torch.func's "
            "functional_call, say), but the optimizer in backward belongs to the parameter.",
            reason="fused_weight_replaced",
            module_path=self.collection,
            what_to_do="convert without whole_graph=True, where such a tensor gets its gradient as usual.",
        )

    def _batch(self, features: KeyedJaggedTensor) -> LookupBatch:
        if self.unpooled:
            return _one_bag_per_key(features.values(), features.length_per_key())
        return LookupBatch(
            values=features.values(),
            offsets=features.offsets(),
            per_sample_weights=features.weights() if self.is_weighted else None,
            batch_size=features.stride(),
            lengths=tuple(features.length_per_key_or_none() or ()),
        )

    def _pool_partly_trained(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Values below -1 are rows that are read but not trained."""
        values, weights = features.values(), features.weights_or_none()
        if weights is not None and weights.requires_grad and torch.is_grad_enabled():
            raise InputError(
                "the batch's weights require a gradient, but some of its ids are not admitted yet.",
                reason="weights_require_grad",
                module_path=self.collection,
                what_to_do="detach the weights; or convert with HashConfig(unseen='zeros'), or admit_after=1.",
            )
        with torch.no_grad():
            (read,) = self._call(self._batch(keep_ids(features, -values - 2, values < -1)))
        return self._call(self._batch(keep_ids(features, values, values >= -1)))[0] + read

    def __getstate__(self) -> dict[str, object]:
        # The kernel depends on the tables, so a copy chooses its own.
        return {**self.__dict__, "_choice": None, "_own": [], "leaves": [], "detached": []}


def _one_bag_per_key(values: torch.Tensor, lengths: list[int]) -> LookupBatch:
    # What the host knows stays known if there are no data.
    borders = torch.tensor([0, *accumulate(lengths)], device="cpu" if values.is_meta else values.device)
    return LookupBatch(values, borders, None, batch_size=1, lengths=tuple(lengths))


def _inside_torch_func() -> bool:
    """Whether this runs inside torch.func.grad, vjp etc., where tensors are wrappers and have no memory addresses."""
    return torch._C._functorch.maybe_current_level() is not None


def _may_read_untrained(table: TableSpec) -> bool:
    return table.admits and table.hashing is not None and table.hashing.unseen != "zeros"

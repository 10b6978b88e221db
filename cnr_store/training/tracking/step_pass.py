"""Finds the tables of a step, looks at all of them in one pass, and tells which need a closer look.

Nearly all tables are plain: in host memory, contiguous, and changed since the last step by this step alone. Python code
for each of them would take longer than their lookups, so that loops over all of them run in C, as far as they can.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import chain, compress
from operator import attrgetter, ne
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.optim import Optimizer

from cnr_store.training.model.optimizer_state import parts_of
from cnr_store.training.model.tensors import overlapping
from cnr_store.training.tracking import bitmap
from cnr_store.training.tracking.bitmap import WORD_BYTES
from cnr_store.training.tracking.optimizer_rules import Classes, may_move_untouched_rows, written_slots
from cnr_store.training.tracking.table_tracker import Counters, TableTracker

log = logging.getLogger("cnr_store")
Stepped = list[tuple[int, TableTracker]]
"""Tables that an optimizer steps, each with the position of its parameter group."""

_TensorBase: Any = torch._C.TensorBase
_gradient_of, _version_of = _TensorBase.grad.__get__, _TensorBase._version.__get__
_pointer_of, _strides_of, _storage_of = _TensorBase.data_ptr, _TensorBase.stride, _TensorBase.untyped_storage
_layout_of, _nbytes_of, _is_cpu = (
    getattr(_TensorBase, name).__get__ for name in ("layout", "nbytes", "is_cpu")
)
_is_contiguous, _size_of = _TensorBase.is_contiguous, _TensorBase.numel
_indices_of, _sparse_dims_of = _TensorBase._indices, _TensorBase.sparse_dim
_shape_of, _known_version, _cdata = attrgetter("shape"), attrgetter("version"), attrgetter("_cdata")


class StepPass:
    """The tables that one optimizer steps, as lists that the hooks around each of its steps go through.

    It takes the bitmaps and counters that the trackers have when it is made, and is out of date when they get others:
    what is acknowledged to a counter that nobody asks any more makes its table whole.

    `parameters`: the ids of all parameters, by group.
    `stepped`: the tables among them.
    `renewal`: that of trackers when it was made.

    `others`: those of them that are not plain, and always need a closer look.
    """

    def __init__(self, optimizer: Optimizer, parameters: list[list[int]], stepped: Stepped) -> None:
        self.parameters, self.stepped, self.renewal = parameters, stepped, TableTracker.renewal
        self._tables: Stepped = []
        self.others: Stepped = []
        counters: list[tuple[Counters, Counters]] = []
        is_known = all(type(kept) is dict for kept in optimizer.state.values())
        for position, tracker in stepped:
            found = tracker.settled_counters(optimizer) if is_known and _is_plain(tracker) else None
            (self.others if found is None else self._tables).append((position, tracker))
            if found is not None:
                counters.append(found)
        self._trackers = [tracker for _, tracker in self._tables]
        self._parameters: list[Any] = [tracker.table.parameter for tracker in self._trackers]
        self._settings = {(position, tracker.table.parameter.dtype) for position, tracker in self._tables}
        self.begin_interval()
        self._note_bits()
        self._note_counters(optimizer, counters)

    def _note_bits(self) -> None:
        # With the memory itself, so that no address is that of freed memory.
        self._hosts = [tracker.bits.host for tracker in self._trackers]
        self._bitmaps = np.array([host.ctypes.data for host in self._hosts if host is not None], np.int64)
        self._rows = np.array([tracker.bits.rows for tracker in self._trackers], np.int64)
        self._shapes = list(map(_shape_of, self._parameters))
        self._nbytes = [parameter.nbytes for parameter in self._parameters]
        self._row_words = np.array(self._nbytes, np.int64) // (WORD_BYTES * np.maximum(self._rows, 1))

    def _note_counters(self, optimizer: Optimizer, counters: Sequence[tuple[Counters, Counters]]) -> None:
        """Note what is known of the parameters, then of the slots in the order of the optimizer's state."""
        tables = {id(parameter): table for table, parameter in enumerate(self._parameters)}
        state = optimizer.state if self._tables else {}
        places = [(tables.get(id(parameter), -1), key) for parameter, kept in state.items() for key in kept]
        self._are_slots = [table >= 0 and key in counters[table][1] for table, key in places]
        slots = list(compress(places, self._are_slots))
        self._counters = [of_parameter[""] for of_parameter, _ in counters]
        self._counters += [counters[table][1][key] for table, key in slots]
        self._of_tensors = np.array([*tables.values(), *(table for table, _ in slots)], np.int64)
        # How often one step may change each. Trusted classes have no limit, and their tables get a closer look.
        written = written_slots(optimizer) or ()
        self._limits = np.array([1] * len(tables) + [key in written for _, key in slots], np.int64)
        values = list(chain.from_iterable(map(dict.values, state.values())))
        self._are_tensors = [isinstance(value, torch.Tensor) for value in values]
        self._state = self._identity(state, values)
        self._pointers = [counter.pointer for counter in self._counters]
        self._storages = [counter.storage for counter in self._counters]
        self._strides = [counter.strides for counter in self._counters]

    def _identity(self, state: Any, values: list[Any]) -> tuple[list[Any], ...]:
        """What tells that an optimizer's state has other values, of a number or a tensor that it had."""
        tensors = compress(values, self._are_tensors)
        return (
            [*map(id, state)],
            [*chain.from_iterable(state.values())],
            [*map(type, values)],
            [*map(id, tensors)],
        )

    def begin_interval(self) -> None:
        """Tell each table of its next step by the optimizer: in an interval the first one counts."""
        self._noted = [False] * len(self._tables)

    def unchanged(self, optimizer: Optimizer) -> list[TableTracker]:
        """The tables that have the memory that they had, and no change that is not acknowledged."""
        tensors, versions = self._look(optimizer)
        if tensors is None:
            return []
        left = self._elsewhere(tensors)
        left |= self._differing(versions, list(map(_known_version, self._counters)))
        return [tracker for table, tracker in enumerate(self._trackers) if table not in left]

    def before(self, optimizer: Optimizer) -> Stepped:
        """The tables that may have changed since the last step."""
        tensors, versions = self._look(optimizer)
        if tensors is None:
            return self.stepped
        return self._with_others(self._differing(versions, list(map(_known_version, self._counters))))

    def after(self, optimizer: Optimizer, trusted: Classes) -> Stepped:
        """Flag the rows that the step had gradients for, and acknowledge what it changed.

        The memory of tensors is compared here only: other memory is found after the step as well as before it.

        Returns: The tables with which neither was done.
        """
        tensors, versions = self._look(optimizer)
        if tensors is None or type(optimizer) in trusted:
            return self.stepped
        # Where a step may change tables otherwise than by rows with a gradient, and once, counted.
        if any(may_move_untouched_rows(optimizer, *setting) for setting in self._settings):
            return self.stepped
        changes = np.array(versions, np.int64)
        changes -= np.fromiter(map(_known_version, self._counters), np.int64, len(versions))
        left = self._elsewhere(tensors)
        left.update(self._of_tensors[(changes < 0) | (changes > self._limits)].tolist())
        changed = np.zeros(len(self._tables), np.bool_)
        changed[self._of_tensors[changes != 0]] = True
        self._flag(optimizer, changed, left)
        # Last: were this interrupted, the changes would still need an explanation.
        for counter, version, table in zip(self._counters, versions, self._of_tensors.tolist(), strict=True):
            if table not in left:
                counter.version = version
        return self._with_others(left)

    def _look(self, optimizer: Optimizer) -> tuple[list[Any] | None, list[int]]:
        """The tensors whose changes are counted, and their versions; None where the state is not what it was."""
        state: Any = optimizer.state
        try:
            values = list(chain.from_iterable(map(dict.values, state.values())))
            if not self._tables or self._identity(state, values) != self._state:
                return None, []
            tensors = [*self._parameters, *compress(values, self._are_slots)]
            return tensors, list(map(_version_of, tensors))
        except (TypeError, RuntimeError):  # no dictionaries; tensors of inference mode have no versions
            return None, []

    def _elsewhere(self, tensors: Sequence[Any]) -> set[int]:
        """The tables that have other memory than was known, or another shape."""
        looks: tuple[tuple[Callable[[], Iterator[object]], Sequence[object]], ...] = (
            (lambda: map(_shape_of, self._parameters), self._shapes),
            (lambda: map(_pointer_of, tensors), self._pointers),
            (lambda: map(_cdata, map(_storage_of, tensors)), self._storages),
            (lambda: map(_strides_of, tensors), self._strides),
        )
        left: set[int] = set()
        for look, known in looks:
            # Thousands of tuples at once would wake the garbage collector at each step.
            if any(map(ne, look(), known)):
                left |= self._differing(list(look()), known)
        return left

    def _differing(self, now: Sequence[object], known: Sequence[object]) -> set[int]:
        """The tables of those tensors that differ."""
        if now == known:
            return set()
        each = zip(now, known, self._of_tensors.tolist(), strict=False)
        return {table for one, other, table in each if one != other}

    def _flag(self, optimizer: Optimizer, changed: npt.NDArray[np.bool_], left: set[int]) -> None:
        """Flag the rows of each table with a gradient but those in `left`, which gets those that need a closer look."""
        gradients, tables = [], []
        for table, gradient in enumerate(map(_gradient_of, self._parameters)):
            if gradient is None:
                if changed[table]:
                    left.add(table)
                continue
            if not self._noted[table]:
                self._trackers[table].note_step(optimizer)
                self._noted[table] = self._trackers[table].has_optimizer
            if table not in left:
                gradients.append(gradient)
                tables.append(table)
        are_plain = not set(map(type, gradients)) - {torch.Tensor} and all(map(_is_cpu, gradients))
        if not (are_plain and bitmap.is_compiled()):
            left.update(tables)
            return
        layouts = list(map(_layout_of, gradients))
        for layout in set(layouts):
            alike = [each == layout for each in layouts]
            mark = self._flag_dense if layout == torch.strided else self._flag_sparse
            mark(list(compress(tables, alike)), list(compress(gradients, alike)), left)

    def _flag_dense(self, tables: list[int], gradients: list[Any], left: set[int]) -> None:
        addresses = np.fromiter(map(_pointer_of, gradients), np.int64, len(gradients))
        is_plain = not (addresses % WORD_BYTES).any() and all(map(_is_contiguous, gradients))
        if not is_plain or list(map(_nbytes_of, gradients)) != [self._nbytes[table] for table in tables]:
            left.update(tables)
            return
        bitmap.mark_nonzero_of_tables(
            self._bitmaps[tables], self._rows[tables], addresses, self._row_words[tables]
        )

    def _flag_sparse(self, tables: list[int], gradients: list[Any], left: set[int]) -> None:
        is_plain = gradients[0].layout == torch.sparse_coo and set(map(_sparse_dims_of, gradients)) == {1}
        ids = list(map(_indices_of, gradients)) if is_plain else []  # kept while their addresses are in use
        if not ids or not all(map(_is_contiguous, ids)):
            left.update(tables)
            return
        addresses, counts = (np.fromiter(map(of, ids), np.int64, len(ids)) for of in (_pointer_of, _size_of))
        bitmap.mark_ids_of_tables(self._bitmaps[tables], self._rows[tables], addresses, counts)
        left.update(np.array(tables)[counts <= 0].tolist())  # with no ids, or with some out of range

    def _with_others(self, tables: Collection[int]) -> Stepped:
        return [*self.others, *(self._tables[table] for table in tables)]


def _is_plain(tracker: TableTracker) -> bool:
    """Whether a table is one whose gradients the kernels can take, and whose changes torch counts."""
    parameter = tracker.table.parameter
    return (
        tracker.table.is_plain
        and tracker.bits.host is not None
        and parameter.layout is torch.strided
        and parameter.is_contiguous()
        and parameter.numel() > 0
        and not tracker.resized
        and not tracker.is_in_shared_memory
        and parameter.nbytes // len(parameter) % WORD_BYTES == 0  # of one row, the stride may be any number
    )


class SteppedTables:
    """Finds the tracked tables among the parameters of an optimizer.

    The result is kept while the groups hold the same parameters, and trackers their bitmaps and counters.

    `trackers`: of the tables.
    `given`: the optimizers whose state is saved.
    """

    def __init__(self, trackers: Iterable[TableTracker], given: Sequence[Optimizer] = ()) -> None:
        self._trackers = {id(tracker.table.parameter): tracker for tracker in trackers}
        self._given = given
        self._strangers: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # those that stepped in this interval
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()  # whose state was looked for
        self._passes: weakref.WeakKeyDictionary[Optimizer, StepPass] = weakref.WeakKeyDictionary()

    def pass_over(self, optimizer: Optimizer) -> StepPass:
        """What goes through the tables that an optimizer steps."""
        parameters = [list(map(id, group["params"])) for group in optimizer.param_groups]
        found = self._passes.get(optimizer)
        if found is None or found.parameters != parameters or found.renewal is not TableTracker.renewal:
            stepped = [
                (position, self._trackers[parameter])
                for position, group in enumerate(parameters)
                for parameter in group
                if parameter in self._trackers
            ]
            found = self._passes[optimizer] = StepPass(optimizer, parameters, stepped)
        return found

    def unchanged(self, optimizers: Sequence[Optimizer]) -> list[TableTracker]:
        """Tables of one of these optimizers, without a change that is not acknowledged, as far as a pass tells."""
        steppers = Counter(id(tracker) for each in optimizers for _, tracker in self.pass_over(each).stepped)
        return [
            tracker
            for each in optimizers
            for tracker in self.pass_over(each).unchanged(each)
            if steppers[id(tracker)] == 1
        ]

    def begin_interval(self) -> None:
        """Begin an interval, before the trackers do."""
        self._strangers.clear()
        for each in self._passes.values():
            each.begin_interval()

    def note_step(self, optimizer: Optimizer) -> None:
        """Note that an optimizer begins a step."""
        if not any(optimizer is each for each in self._given):
            self._strangers.add(optimizer)

    def overwritten(self) -> dict[str, str]:
        """Why tables are whole over whose memory optimizers stepped parameters of others in this interval, by name."""
        found: dict[str, str] = {}
        tables = [tracker.table.parameter for tracker in self._trackers.values()] if self._strangers else []
        for optimizer in self._strangers:
            own = [one for group in optimizer.param_groups for one in group["params"]]
            others = {id(one) for one in own} - self._trackers.keys()
            for pair in overlapping([*tables, *own]) if others else ():
                for tensor, other in (pair, pair[::-1]):
                    if id(other) in others and (tracker := self._trackers.get(id(tensor))) is not None:
                        why = (
                            f"a step of {type(optimizer).__name__} changed another parameter over its memory"
                        )
                        found[tracker.table.name] = why
        return found

    def warn_of_strangers(self, owned: Callable[[], Collection[int]], objects: object) -> None:
        """Log once of each optimizer that was not given, steps parameters of the model, and has state not saved.

        Of one that steps within another one, such as a wrapper, the state may be in the other's ``state_dict``.
        `owned` gives the ids of the parameters that are saved; `objects` is further state that is.
        """
        for optimizer in self._strangers - self._known:
            ids = owned()
            stepped = [one for group in optimizer.param_groups for one in group["params"] if id(one) in ids]
            kept = [*filter(torch.is_tensor, parts_of([optimizer.state.get(one) for one in stepped]))]
            if not kept:
                continue
            self._known.add(optimizer)
            saved = parts_of([objects, [each.state_dict() for each in self._given]])
            if {*map(id, kept)} - {*map(id, saved)}:
                log.warning(
                    "%d parameters of the model are updated by %s, whose state is in no version; give all optimizers "
                    "that train: Checkpointer(url, model, optimizer)",
                    *(len(stepped), type(optimizer).__name__),
                )

    def replace_parameter(self, tracker: TableTracker, parameter: object) -> None:
        """Look for `parameter` instead of the one that the tracker's table had."""
        self._trackers.pop(id(tracker.table.parameter), None)
        self._trackers[id(parameter)] = tracker
        self._passes.clear()

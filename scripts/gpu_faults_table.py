"""Faults in code for GPUs, of kinds that often show only on a GPU, and the test that finds each without one.

Each is a change of a line or two of the package. Whoever changes such a line changes it here as well.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["FAULTS", "Fault"]


@dataclass(frozen=True)
class Fault:
    """One change in a file of the package, and the tests of which one has to fail."""

    kind: str
    name: str
    path: str
    """In the folder ``mpikv``."""
    before: str
    """What is there once."""
    after: str
    test: str
    """In ``tests/gpu/stand_ins``, as pytest is told, with the numbers of ranks where it takes several."""
    library: str = "mpich"
    """Whose environment it needs: ``cuda`` where NVRTC is to find it."""

    def applied(self, source: bytes) -> bytes:
        """Return the source of the file with the change in it.

        Raises:
            LookupError: the file has changed.
        """
        if source.count(self.before.encode()) != 1:
            raise LookupError(f"{self.name}: mpikv/{self.path} has not once {self.before!r}")
        return source.replace(self.before.encode(), self.after.encode())


ROUNDING = [
    Fault(
        "rounding",
        "subnormal numbers are flushed to zero",
        "compute/cuda/loading.py",
        '"--ftz=false"',
        '"--ftz=true"',
        "test_cuda.py::TestPreparation::test_nor_does_one_that_assigns",
    ),
    Fault(
        "rounding",
        "a product and a sum are fused",
        "compute/cuda/loading.py",
        '"--fmad=false"',
        '"--fmad=true"',
        "test_cuda.py::TestPreparation::test_nor_does_one_that_assigns",
    ),
    Fault(
        "rounding",
        "an option is added, as CuPy's RawModule does",
        "compute/cuda/images.py",
        "            text, options, name_expressions",
        '            text, (*options, "-ftz=true"), name_expressions',
        "test_cuda.py::TestPreparation::test_nor_does_one_that_assigns",
    ),
    Fault(
        "rounding",
        "ties of float16 go up",
        "compute/cuda/numbers.h",
        "(magnitude + 0xFFFu + (magnitude >> 13 & 1u)",
        "(magnitude + 0x1000u",
        "test_cuda.py::test_every_tie_is_rounded",
    ),
    Fault(
        "rounding",
        "bfloat16 is cut off",
        "compute/cuda/numbers.h",
        "return (word + 0x7FFFu + (word >> 16 & 1u)) >> 16;",
        "return word >> 16;",
        "test_cuda.py::test_every_tie_is_rounded",
    ),
    Fault(
        "rounding",
        "subnormal float16 are read as zero",
        "compute/cuda/numbers.h",
        "bits_of((float)magnitude * 5.9604644775390625e-08f)",
        "bits_of((float)magnitude * 0.0f)",
        "test_cuda.py::test_every_half_is_widened",
    ),
    Fault(
        "rounding",
        "a norm is added up in another order",
        "compute/cuda/pairwise.h",
        "(sum[0] + sum[1]) + (sum[2] + sum[3])",
        "((sum[0] + sum[1]) + sum[2]) + sum[3]",
        "test_cuda_norms.py::test_every_way_of_halving",
    ),
]

ARGUMENTS = [
    Fault(
        "arguments",
        "two pointers change places",
        "compute/cuda/codes.py",
        '        ("gradient", np.uintp),\n        ("numbers", np.uintp),\n',
        '        ("numbers", np.uintp),\n        ("gradient", np.uintp),\n',
        "test_cuda.py::test_layouts",
    ),
    Fault(
        "arguments",
        "a structure is too short",
        "compute/cuda/kernels.py",
        '("row", np.int32, room.ranges)',
        '("row", np.int16, room.ranges)',
        "test_cuda.py::test_layouts",
    ),
    Fault(
        "arguments",
        "a structure has more than 4096 bytes",
        "compute/cuda/copies.py",
        "MOST = 127",
        "MOST = 160",
        "test_cuda.py::test_numbers_that_are_too_large",
    ),
    Fault(
        "arguments",
        "the arguments are gone at the launch",
        "compute/cuda/loading.py",
        "(parameter_at(given.ctypes.data),)",
        "(parameter_at(given.copy().ctypes.data),)",
        "test_cuda.py::test_cupy_passes_the_arguments_by_value",
        "cuda",
    ),
]

LAUNCHES = [
    Fault(
        "launches",
        "a grid is a block too small",
        "compute/cuda/kernels.py",
        "-(-(end - begin) // PART)",
        "max(1, (end - begin) // PART)",
        "test_cuda_memory.py::test_an_update_reads_and_writes_each_number_once",
    ),
    Fault(
        "launches",
        "a grid counts bits of another code",
        "compute/cuda/codes.py",
        '("one_bit", 1)',
        '("one_bit", 2)',
        "test_cuda_memory.py::test_codes",
    ),
    Fault(
        "launches",
        "a block has half of the threads",
        "compute/cuda/norms.py",
        "CELL, PIECES, SCALED_PART, THREADS = 1 << 16, 4, 1 << 12, 256",
        "CELL, PIECES, SCALED_PART, THREADS = 1 << 16, 4, 1 << 12, 128",
        "test_cuda_norms.py::test_every_way_of_halving",
    ),
    Fault(
        "launches",
        "the last numbers of an array are left out",
        "compute/cuda/numbers.h",
        "if (first < count) visit(places);",
        "if (first + GROUP <= count) visit(places);",
        "test_cuda_memory.py::test_an_update_reads_and_writes_each_number_once",
    ),
    Fault(
        "launches",
        "numbers are moved one by one",
        "compute/cuda/numbers.h",
        "aligned && first + GROUP <= count};",
        "false};",
        "test_cuda_memory.py::test_updates_move_16_bytes_at_once",
    ),
    Fault(
        "launches",
        "a norm takes a pass too many",
        "compute/cuda/layerwise.cu",
        "const Group<T> weight = layer.weights(places), total = read(layer.total, places);",
        "const Group<T> weight = layer.weights(places), total = read(layer.total, places);\n"
        "        layer.change(weight, places);",
        "test_cuda_memory.py::test_layers_are_walked_through_twice",
    ),
    Fault(
        "launches",
        "registers are spilled to memory",
        "compute/cuda/rules.cu",
        "sizeof(typename Kind::stored) == 4 ? 4 : 3 };",
        "8 };",
        "test_cuda.py::test_machine_code[rules.cu-sm_90]",
        "cuda",
    ),
]

ADDRESSES = [
    Fault(
        "addresses",
        "16 bytes at once, wherever they begin",
        "compute/cuda/numbers.h",
        "return (word64)numbers % alignof(Group<T>) == 0;",
        "return (word64)numbers % alignof(T) == 0;",
        "test_cuda_memory.py::test_casts",
    ),
    Fault(
        "addresses",
        "the alignment of one of the arrays is forgotten",
        "compute/cuda/rules.cu",
        " && is_aligned(master);",
        ";",
        "test_cuda_memory.py::test_one_array_that_is_not_aligned",
    ),
    Fault(
        "addresses",
        "a copy looks at one of its ends only",
        "compute/cuda/copies.cu",
        "(word64)source | (word64)target",
        "(word64)source",
        "test_cuda_memory.py::test_copies_of_any_bytes",
    ),
    Fault(
        "addresses",
        "numbers behind an array are read",
        "compute/cuda/numbers.h",
        "if (places.has(k)) group.number[k] = source[places(k)];",
        "group.number[k] = source[places(k)];",
        "test_cuda_memory.py::test_casts",
    ),
    Fault(
        "addresses",
        "numbers behind an array are written",
        "compute/cuda/numbers.h",
        "if (places.has(k)) target[places(k)] = group.number[k];",
        "target[places(k)] = group.number[k];",
        "test_cuda_memory.py::test_casts",
    ),
    Fault(
        "addresses",
        "32 bits count the elements of a value",
        "compute/cuda/rules.cu",
        "(long long)blockIdx.x * PART",
        "blockIdx.x * PART",
        "test_cuda_memory.py::test_an_update_of_a_vast_value",
    ),
    Fault(
        "addresses",
        "32 bits count the bytes of a copy",
        "compute/cuda/copies.cu",
        "const long long low = (blockIdx.x - (pair ? pairs.end[pair - 1] : 0)) * length;",
        "const unsigned int low = (blockIdx.x - (pair ? pairs.end[pair - 1] : 0)) * length;",
        "test_cuda_memory.py::test_vast_copies",
    ),
    Fault(
        "addresses",
        "32 bits count the elements of a table",
        "compute/cuda/rows.cu",
        "(Bits*)given.target + (walk.has(k) ? given.ids[walk.row(k)] * given.width : 0)",
        "(Bits*)given.target + (walk.has(k) ? (word32)(given.ids[walk.row(k)] * given.width) : 0)",
        "test_cuda_memory.py::test_rows_of_a_vast_table",
    ),
    Fault(
        "addresses",
        "another library's memory is taken for an array's own",
        "arrays/arrays.py",
        "owned = address is _address_of and all(",
        "owned = all(",
        "test_sums.py::test_arrays_that_are_filled_may_be_those_of_other_names --ranks=1",
    ),
    Fault(
        "addresses",
        "a value is not found in another library's array",
        "engine/values.py",
        "array.size > 0 and self._arena.holds_any(np.array([address(array)], np.uint64), address)",
        "self._arena.holds(array)",
        "test_device.py::test_another_librarys_views_of_values_are_read_before_these_change --ranks=1",
    ),
]

BLOCKS = [
    Fault(
        "threads",
        "threads do not wait for each other",
        "compute/cuda/pairwise.h",
        "    work(threadIdx.x);\n    __syncthreads();",
        "    work(threadIdx.x);",
        "test_cuda.py::test_no_operation_is_fused_or_approximate[norms.cu]",
        "cuda",
    ),
    Fault(
        "threads",
        "one thread takes what others have not brought yet",
        "compute/cuda/layerwise.cu",
        "cells[thread] = sums_of(given.sums, first + thread);\n"
        "        });\n"
        "        all_threads([&](unsigned int thread) {\n",
        "cells[thread] = sums_of(given.sums, first + thread);\n",
        "test_cuda_memory.py::test_layers_are_walked_through_twice",
    ),
    Fault(
        "threads",
        "two blocks write to one place",
        "compute/cuda/pairwise.h",
        "sums[2 * (long long)blockIdx.x] =",
        "sums[2 * (long long)(blockIdx.x / PIECES)] =",
        "test_cuda_memory.py::test_norms_and_scaling",
    ),
    Fault(
        "threads",
        "a block's memory is too small",
        "compute/cuda/pairwise.h",
        "LEAVES = 1 << 8",
        "LEAVES = 1 << 6",
        "test_cuda_norms.py::test_every_way_of_halving",
    ),
    Fault(
        "threads",
        "a block's memory is larger than a GPU has",
        "compute/cuda/pairwise.h",
        "LEAVES = 1 << 8",
        "LEAVES = 1 << 12",
        "test_cuda.py::test_machine_code[norms.cu-sm_90]",
        "cuda",
    ),
]

STREAMS = [
    Fault(
        "streams",
        "a call does not come after its caller's stream",
        "memory/stream_order.py",
        "        self.stream.wait(caller.record())\n        call.caller, call.made = caller, made",
        "        call.caller, call.made = caller, made",
        "test_nccl.py::test_streams_of_a_program_and_of_a_store_are_in_order --ranks=1",
    ),
    Fault(
        "streams",
        "a caller's stream does not come after the call",
        "memory/stream_order.py",
        "            caller.wait(done)\n",
        "",
        "test_nccl.py::test_streams_of_a_program_and_of_a_store_are_in_order --ranks=1",
    ),
    Fault(
        "streams",
        "arrays are let go of while a GPU uses them",
        "memory/stream_order.py",
        "            self._keep(done, (arguments, made))",
        "            self._keep(done, ())",
        "test_nccl.py::test_streams_of_a_program_and_of_a_store_are_in_order --ranks=1",
    ),
    Fault(
        "streams",
        "the memory of a new array may be in use",
        "memory/stream_order.py",
        "            self.stream.wait(call.caller.record())\n        call.made.append(array)",
        "            pass\n        call.made.append(array)",
        "test_device_work.py::test_memory_of_new_arrays_may_be_in_use_until_it_is_taken --ranks=1",
    ),
    Fault(
        "streams",
        "a message is sent before it is packed",
        "memory/stream_order.py",
        "        self.lane.wait(self.stream.record())\n",
        "",
        "test_overlap.py::test_messages_travel_while_others_are_updated_and_copied --ranks=2",
    ),
    Fault(
        "streams",
        "a sum is used before it has come",
        "memory/stream_order.py",
        "        if sent is not None:\n            self.stream.wait(sent)\n",
        "        if sent is not None:\n",
        "test_overlap.py::test_messages_travel_while_others_are_updated_and_copied --ranks=2",
    ),
    Fault(
        "streams",
        "pinned memory is filled before its copy is done",
        "compute/cuda/gpu.py",
        "            if busy is not None:\n                busy.synchronize()\n",
        "",
        "test_gpu.py::test_uploads_arrive_whole_though_their_arrays_change",
    ),
    Fault(
        "streams",
        "pinned memory is emptied before it is full",
        "compute/cuda/gpu.py",
        "    event.synchronize()\n    target[...] = piece",
        "    target[...] = piece",
        "test_gpu.py::test_downloads_are_whole_when_they_return",
    ),
    Fault(
        "streams",
        "pinned memory goes back while a copy reads it",
        "compute/cuda/gpu.py",
        "    _left.extend(pair for pair in pieces if pair[1] is not None)",
        "    pass",
        "test_gpu.py::test_pinned_memory_outlives_the_copies_from_it",
    ),
    Fault(
        "streams",
        "a copy is made on the default stream",
        "compute/cuda/gpu.py",
        "        stream = self.cuda.get_current_stream().ptr\n",
        "        stream = 0\n",
        "test_gpu.py::test_hosts_arrays_come_and_go",
    ),
    Fault(
        "streams",
        "an event is recorded again that somebody waits for",
        "compute/cuda/gpu.py",
        "return self.spare_events.pop()",
        "return self.spare_events[-1]",
        "test_gpu.py::test_no_event_is_recorded_again_that_somebody_holds",
    ),
    Fault(
        "streams",
        "work is given to another GPU",
        "compute/cuda/gpu.py",
        "    @_translated\n    def copy(",
        "    def copy(",
        "test_gpu.py::test_kernels_are_launched_on_its_gpu",
    ),
    Fault(
        "streams",
        "a kernel is compiled for another GPU",
        "compute/cuda/gpu.py",
        "return CudaKernels(self.present)",
        "return CudaKernels()",
        "test_gpu.py::test_kernels_are_compiled_for_its_gpu",
    ),
    Fault(
        "streams",
        "a weight is updated by another GPU",
        "train/local_update.py",
        "with parameter.gpu.current():",
        "if parameter.gpu.current():",
        "test_gpu_trainer.py::test_the_weights_gpu_need_not_be_the_present_one --ranks=1",
    ),
    Fault(
        "streams",
        "a graph outlives what it uses",
        "transports/nccl.py",
        "            self._order.wait()\n            self._order.drop_graphs()\n",
        "            self._order.wait()\n",
        "test_replay.py::test_graphs_end_before_what_they_use --ranks=2",
    ),
]

NCCL = [
    Fault(
        "NCCL",
        "a dtype is another one",
        "transports/nccl.py",
        'Wire("float64", "NCCL_FLOAT64")',
        'Wire("float64", "NCCL_INT64")',
        "test_nccl.py::TestNccl::test_allreduce --ranks=2",
    ),
    Fault(
        "NCCL",
        "an operation is another one",
        "transports/nccl.py",
        'Wire("uint8", "NCCL_UINT8", "NCCL_MAX")',
        'Wire("uint8", "NCCL_UINT8")',
        "test_nccl.py::TestNccl::test_allreduce --ranks=2",
    ),
    Fault(
        "NCCL",
        "a count is of complex numbers, and not of their halves",
        "transports/nccl.py",
        "counts[0] * wire.each, *self._sort(wire))",
        "counts[0], *self._sort(wire))",
        "test_nccl.py::TestNccl::test_reduce_scatter --ranks=2",
    ),
    Fault(
        "NCCL",
        "a count is of elements, and not of bytes",
        "transports/nccl.py",
        "address, nbytes[0], byte)",
        "address, counts[0], byte)",
        "test_nccl.py::TestNccl::test_all_gather --ranks=2",
    ),
    Fault(
        "NCCL",
        "messages are no group",
        "transports/nccl.py",
        "            with self._grouped():\n                for peer in",
        "            if True:\n                for peer in",
        "test_nccl.py::TestNccl::test_all_to_all --ranks=2",
    ),
    Fault(
        "NCCL",
        "a group has no end",
        "transports/nccl.py",
        "            raise\n        self._call(self._nccl.groupEnd, on_stream=False)\n",
        "            raise\n",
        "test_nccl.py::TestNccl::test_all_to_all --ranks=2",
    ),
    Fault(
        "NCCL",
        "a part in its place is somewhere else",
        "transports/nccl.py",
        "comm.allGather, address + self.rank * nbytes[0], address",
        "comm.allGather, address, address",
        "test_nccl.py::TestNccl::test_all_gather --ranks=2",
    ),
    Fault(
        "NCCL",
        "a call is made on the default stream",
        "transports/nccl.py",
        "function(*arguments, self._order.lane.handle) if on_stream",
        "function(*arguments, 0) if on_stream",
        "test_nccl.py::TestNccl::test_allreduce --ranks=2",
    ),
    Fault(
        "NCCL",
        "ranks take different ones for the root",
        "transports/nccl.py",
        "(comm.broadcast, place, place, length, byte, rank)",
        "(comm.broadcast, place, place, length, byte, rank ^ (self.rank & 1))",
        "test_nccl.py::TestNccl::test_all_gather --ranks=2",
    ),
    Fault(
        "NCCL",
        "what is received is not aligned",
        "transports/nccl.py",
        "return -(-nbytes // _ALIGNMENT) * _ALIGNMENT",
        "return nbytes",
        "test_nccl.py::test_what_is_received_is_aligned --ranks=3",
    ),
]

FAULTS = [*ROUNDING, *ARGUMENTS, *LAUNCHES, *ADDRESSES, *BLOCKS, *STREAMS, *NCCL]

"""Do all ranks run the same collectives in the same order, as many steps, with all parameters?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NOBODY = Blames.NOBODY
_NAMED = Blames.NAMED


class CollectiveMismatch(Cause, id="AR410"):
    """Ranks run different collectives, or the same one with other shapes.

    ## What it means
    At the same position in a group's sequence, one rank runs a broadcast and the others run a barrier, or a rank sends
    a tensor of another size. The usual reason is a branch of the script that depends on the rank, on its data or on a
    random number. A logged value that only some ranks have, or other versions or settings on one node, have the same
    effect.

    ## Why it breaks the job
    The library does not check: messages of two collectives mix, and the job hangs, crashes or computes wrong results.

    ## Example
    From a script with accelerate and TORCH_DISTRIBUTED_DEBUG=DETAIL, and from Gloo without it (pytorch/gloo#334):

        RuntimeError: Detected mismatch between collectives on ranks. Rank 3 is running collective: CollectiveFingerPrint(OpType=BARRIER), but Rank 0 is running collective: CollectiveFingerPrint(OpType=ALLGATHER_COALESCED).
        what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:490] op.preamble.length <= op.nbytes. 881392472 vs 881392448

    ## Fix
    The guard of `allranks run` reports which rank called what, and where. Without it, run once with a comparison before
    each collective, and look at the script lines in its message:

        TORCH_DISTRIBUTED_DEBUG=DETAIL TORCH_SHOW_CPP_STACKTRACES=1 torchrun ...

    Remove `if rank == 0:` around every collective call, including hidden ones: `log(..., sync_dist=True)`,
    `state_dict()` of FSDP and ZeRO-3, and a forward pass through DDP with buffers.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/ProcessGroupWrapper.cpp, reducer.cpp and utils.hpp (2.13 and older). NCCL,
    src/init.cc (several versions), transport/net_ib.cc, net_socket.cc and bootstrap.cc (several versions). Horovod,
    horovod/common/controller.cc (several versions). Gloo, transport/tcp/pair.cc (as in 2.13 and older). DeepSpeed,
    runtime/zero/utils.py (0.18). All read 2026-11-21. https://github.com/pytorch/gloo/issues/334.
    """  # noqa: E501  (real lines)

    message = "{what}"
    told = "ranks did not run the same collective, or ran it with different shapes"
    fix = "run once with TORCH_DISTRIBUTED_DEBUG=DETAIL; remove collectives from branches that only some ranks take"
    exit_code = Exit.USER_CODE
    traits = frozenset({Trait.OF_ONE_CALL})
    also = ("AR408", "AR503", "AR504")
    signs = (
        # NCCL's RAS names those that are elsewhere on the lines after it.
        Sign(
            r"Communicator ranks have different (?P<op>[A-Za-z]{3,20}) operation counts",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"Rank (?P<rank>[0-9]+) -- GPU [0-9,]+ managed by process (?P<pid>[0-9]+) on node (?P<node>[^ ]{1,200})",
            Role.CONTEXT,
            _NAMED,
        ),
        Sign(
            r"Detected mismatch between collectives on ranks(?:\. Rank (?P<rank>[0-9]+) is running (?:inconsistent )?"
            r"collective(?:: CollectiveFingerPrint\((?:SequenceNumber=(?P<seq>[0-9]+)(?:, )?)?OpType=(?P<op>[A-Z_]+))?"
            r"(?:.*but Rank (?P<ranks>[0-9]+) is running)?)?",
            blames=_NAMED,
        ),
        # Where its long sentence is broken into lines.
        Sign(r"^but Rank (?P<rank>[0-9]+) is running (?:inconsistent )?collective", Role.CONTEXT, _NAMED),
        Sign(
            r"DDP expects same model across all ranks, but Rank (?P<rank>[0-9]+) has [0-9]+ params, while rank "
            r"(?P<ranks>[0-9]+) has inconsistent [1-9]",
            blames=_NAMED,
        ),
        Sign(
            r"(?:\[(?P<rank>[0-9]+)\]: )?params\[[0-9]+\] in this process with (?:sizes|strides) .*appears not to "
            r"match (?:sizes|strides) of the same param in process 0"
        ),
        Sign(r"disagreement between rank0 and rank(?P<rank>[0-9]+): rank0: ", blames=_NAMED),
        Sign(r"Mismatched [A-Za-z/_ ]+: One rank ", blames=_NOBODY),
        Sign(
            r"op\.preamble\.length <= op\.nbytes\. (?P<received>[0-9]+) vs (?P<expected>[0-9]+)",
            confidence=Confidence.LIKELY,
        ),
        Sign(r"Received data size doesn't match expected size\. Is there a distributed collective mismatch"),
        # As the analyser of PyTorch's flight recorder says of the dumps.
        Sign(
            r"Culprit rank (?P<rank>[0-9]+); Error type: "
            r"(?P<error>COLLECTIVE_TYPE_MISMATCH|SIZE_OR_SYNTAX_MISMATCH|COLLECTIVE_DTYPE_MISMATCH)",
            blames=_NAMED,
        ),
        # NCCL sees sizes that do not fit; a broken transport and other versions look the same to it.
        Sign(
            r"Mismatched collective detected, please check your collective calls at and around rank (?P<rank>[0-9]+)",
            Role.LIKELY,
            _NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"this may be caused by a collective mismatch around rank (?P<rank>[0-9]+)",
            Role.VICTIM,
            _NAMED,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"(?:peer (?P<peer>[^ ]+) )?collective mismatch error,? local size (?P<local>[0-9]+) remote ",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"NET/Socket : (?:peer (?P<peer>[^ ]{1,80}) )?message truncated : "
            r"receiving (?P<received>[0-9]+) bytes instead of (?P<expected>[0-9]+)",
            Role.LIKELY,
            _NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"Message truncated : received (?P<received>[0-9]+) bytes instead of (?P<expected>[0-9]+)",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(r"MPI_ERR_TRUNCATE: message truncated", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Cannot apply desired operation due to shape mismatches\."),
        Sign(r"Mismatched [a-z]{4,16} tensor (?:shapes|sizes|ranks):"),
    )
    hits = (
        "FailedPreconditionError: Mismatched allreduce tensor shapes: One or more rank",
        "DistributedOperationException: Cannot apply desired operation due to shape mismatches. All shapes across",
        "  Communicator ranks have different AllGather operation counts",
        "  Rank 12 -- GPU 4 managed by process 323032 on node 10.137.190.124",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 1 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=485, OpType=ALLREDUCE, TensorShape=[25], TensorDtypes=Float, "
        "TensorDeviceTypes=TensorOptions(dtype=float (default), device=cuda)), but Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=485, OpType=BROADCAST, TensorShape=[1], TensorDtypes=Long).",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running inconsistent collective: "
        "CollectiveFingerPrint(OpType=BROADCAST, TensorShape=[34112], TensorDtypes=Float",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective: "
        "CollectiveFingerPrint(SequenceNumber=1649OpType=BARRIER), but Rank 1 is running collective: ",
        "RuntimeError: Detected mismatch between collectives on ranks.",
        "RuntimeError: Detected mismatch between collectives on ranks. Rank 0 is running collective:",
        "but Rank 1 is running collective:",
        "RuntimeError: DDP expects same model across all ranks, but Rank 0 has 4 params, while rank 1 has inconsistent "
        "5 params.",
        "RuntimeError: [1]: params[0] in this process with sizes [10, 20] appears not to match sizes of the same param "
        "in process 0.",
        "RuntimeError: disagreement between rank0 and rank3: rank0: [1, 2], rank3: [1]",
        "Mismatched ALLREDUCE tensor shapes: One rank sent a tensor of shape [10], but another rank sent a tensor of "
        "shape [12].",
        "Mismatched MPI operations: One rank did an ALLREDUCE, but another rank did an BROADCAST.",
        "Mismatched CPU/GPU device selection: One rank specified device CPU, but another rank specified device GPU.",
        "  what():  [enforce fail at ../third_party/gloo/gloo/transport/tcp/pair.cc:446] op.preamble.length <= "
        "op.nbytes. 1046204 vs 1040256",
        "[enforce fail at gloo/transport/tcp/pair.cc:456] Received data size doesn't match expected size. Is there a "
        "distributed collective mismatch in your code?",
        "error msg: Culprit rank 1; Error type: COLLECTIVE_TYPE_MISMATCH, Expected collective type: 'all_reduce'",
        "node-v100-1:39719:39719 [3] init.cu:1197 NCCL WARN Mismatched collective detected, please check your "
        "collective calls at and around rank 11. You can use NCCL_DEBUG=INFO and NCCL_DEBUG_SUBSYS=COLL",
        "n1:1:1 [0] init.cc:1205 NCCL WARN Your program may be hanging, this may be caused by a collective mismatch "
        "around rank 3. Please check your collective calls at and around this rank.",
        "node-23-10:1307367:1307586 [0] transport/net_ib.cc:1038 NCCL WARN NET/IB : req 0/1 tag 0 peer "
        "10.151.80.6<58683> collective mismatch error, local size 496640 remote size 65536",
        "NCCL WARN NET/IB : collective mismatch error local size 4096 remote 1024 addr 7f rkey 12 seq 1/1",
        "n1:1:1 [0] transport/net_socket.cc:420 NCCL WARN NET/Socket : message truncated : receiving 1048576 bytes "
        "instead of 65536",
        "node-a:39964:40075 [0] transport/net_socket.cc:600 NCCL WARN NET/Socket : peer 10.81.11.2<45763> message "
        "truncated : receiving 1048576 bytes instead of 524288. If you believe your socket network is in healthy "
        "state, there may be a mismatch in collective sizes or environment settings (e.g. NCCL_PROTO, NCCL_ALGO)",
        "n1:342239:342300 [0] transport/net_socket.cc:424 NCCL WARN NET/Socket : peer 192.168.161.30<59210> message "
        "truncated : receiving 1048576 bytes instead of 65536",
        "p4de-2:4827:6900 [4] bootstrap.cc:77 NCCL WARN Message truncated : received 256 bytes instead of 4",
        "[n1:4123] *** MPI_ERR_TRUNCATE: message truncated",
    )
    misses = (
        "[I ProcessGroupWrapper.cpp:562] [Rank 0] Running collective: CollectiveFingerPrint(SequenceNumber=1277, "
        "OpType=ALLREDUCE, TensorShape=[], TensorDtypes=Float",
        "RuntimeError: DDP expects same model across all ranks, but Rank 1 has 221 params, while rank 0 has "
        "inconsistent 0 params.",
        "RuntimeError: The size of tensor a (10) must match the size of tensor b (12) at non-singleton dimension 0",
        "UserWarning: Truncated message: received 256 bytes",
    )


class UnevenInputs(Cause, id="AR411"):
    """Ranks have different numbers of batches.

    ## What it means
    One rank is at the end of its data while the others still train. Common reasons are an IterableDataset that is not
    split by rank, a custom sampler, shards of different sizes, a filter that drops samples, and `drop_last=False`.

    ## Why it breaks the job
    The finished rank leaves the loop and enters another collective, or ends. The others wait in the gradients'
    all-reduce until the timeout, which names them and not the rank that left.

    ## Example
    From PyTorch with DistributedDataParallel.join(throw_on_early_termination=True), on the finished rank and on the
    others:

        RuntimeError: Rank 1 exhausted all inputs.
        RuntimeError: Detected at least one rank that exhausted inputs. Throwing across all ranks.

    ## Fix
    Make the counts equal, or let DDP continue for the ranks that have finished:

        sampler = DistributedSampler(dataset, drop_last=True)
        with model.join(): ...

    For an IterableDataset, count the batches of each rank first, and stop all ranks at the smallest count.

    ## Source
    PyTorch, torch/distributed/algorithms/join.py (2.13 and older), torch/nn/parallel/distributed.py (old versions),
    torch/utils/data/dataloader.py (2.13). All read 2026-11-21.
    https://github.com/Lightning-AI/pytorch-lightning/issues/9851 and
    https://github.com/pytorch/pytorch/issues/38174 (read 2026-11-21).
    """

    message = "{what}"
    told = "ranks had different numbers of batches: one finished while the others continued"
    fix = "give every rank the same number of batches (DistributedSampler, drop_last=True), or use model.join()"
    exit_code = Exit.USER_CODE
    no_fault_yet = "it needs a script with uneven data; the cluster is not involved"
    also = ("AR409", "AR410")
    signs = (
        Sign(r"Rank (?P<rank>[0-9]+) exhausted all inputs", blames=_NAMED),
        Sign(r"Detected at least one rank that exhausted inputs", blames=_NOBODY),
        Sign(
            r"Detected uneven input skew of greater than [0-9]+\. This means that rank (?P<rank>[0-9]+) has at least",
            Role.LIKELY,
            _NAMED,
            Confidence.LIKELY,
        ),
        # WeNet's and CosyVoice's: one rank was done, and the others met without it (a barrier of Gloo's).
        Sign(r"Detected uneven workload distribution: ", Role.LIKELY, _NOBODY, Confidence.LIKELY),
        # fairseq's: what it gathers is no object of Python, because another rank is elsewhere.
        Sign(r"Unable to unpickle data from other workers\. all_gather_list requires all", blames=_NOBODY),
        # Says only that one loader counts wrong; where ranks wait at the end of an epoch, it is why.
        Sign(
            r"Length of IterableDataset .*was reported to be (?P<expected>[0-9]+)",
            Role.CONTEXT,
            confidence=Confidence.UNDECIDED,
        ),
    )
    hits = (
        "RuntimeError: Rank 1 exhausted all inputs.",
        "RuntimeError: Detected at least one rank that exhausted inputs. Throwing across all ranks.",
        "UserWarning: Detected uneven input skew of greater than 1000. This means that rank 0 has at least 1000 fewer "
        "inputs than other currently-active ranks.",
        "INFO Detected uneven workload distribution: [Rank 0]: Ranks 3 did not come",
        "Exception: Unable to unpickle data from other workers. all_gather_list requires all workers to enter the "
        "function together",
        "UserWarning: Length of IterableDataset <data.Stream object at 0x7f> was reported to be 100 (when accessing "
        "len(dataloader)), but 101 samples have been fetched.",
    )
    misses = (
        "StopIteration",
        "RuntimeError: generator raised StopIteration",
        "UserWarning: The dataloader, train_dataloader, does not have many workers which may be a bottleneck.",
    )


class UnusedParameters(Cause, id="AR412"):
    """DDP waits for gradients of unused parameters, or gets a gradient twice.

    ## What it means
    A layer was not used in this step (a branch, a frozen part, an output that is not in the loss). Or the same
    parameter was used in several backward passes (activation checkpointing, a shared layer, `forward` called twice).

    ## Why it breaks the job
    DDP reduces gradients in buckets and waits until a bucket is full. If one gradient is missing, the bucket never
    fills, and DDP notices at the next forward pass. If only some ranks skip a layer, the others hang in the all-reduce.

    ## Example
    From buxiangzhiren/DDCap#35:

        RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This error indicates that your module has parameters that were not used in producing loss.
        Parameter indices which did not receive grad for rank 0: 1

    ## Fix
    Find the parameter by name. Then remove it from the model, freeze it, or let DDP detect unused parameters in each
    step:

        TORCH_DISTRIBUTED_DEBUG=DETAIL
        DistributedDataParallel(model, find_unused_parameters=True)

    For `marked as ready twice`, use `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)` or
    `static_graph=True`.

    ## Source
    PyTorch, torch/csrc/distributed/c10d/reducer.cpp (2.13 and older). Lightning, strategies/ddp.py (2.5). DeepSpeed,
    runtime/zero/stage_1_and_2.py (0.18). All read 2026-11-21.
    https://github.com/buxiangzhiren/DDCap/issues/35 (read 2026-11-21).
    """  # noqa: E501  (a real line)

    message = "{what}"
    told = "parameters took no part in the loss, or took part more than once, so DDP cannot reduce their gradients"
    fix = "TORCH_DISTRIBUTED_DEBUG=DETAIL names the parameter; remove it, freeze it, or set find_unused_parameters=True"
    exit_code = Exit.USER_CODE
    traits = frozenset({Trait.OF_ONE_CALL})
    no_fault_yet = "a bug of the model; the cluster is not involved"
    signs = (
        Sign(r"Expected to have finished reduction in the prior iteration before starting a new one"),
        Sign(r"Expected to mark a variable ready only once"),
        Sign(r"Parameter at index [0-9]+ (?:with name (?P<thing>[^ ]+) )?has been marked as ready twice"),
        Sign(r"this is not compatible with static_graph set to True"),
        Sign(r"Parameter indices which did not receive grad for rank (?P<rank>[0-9]+): (?P<indices>[0-9 ]+)"),
        Sign(r"Parameters which did not receive grad for rank (?P<rank>[0-9]+): (?P<thing>[^ ,]+)"),
        Sign(r"has parameters that were not used in producing the loss returned by training_step"),
        Sign(r"has already been reduced\. Gradient computed twice for this partition"),
    )
    hits = (
        "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one. This "
        "error indicates that your module has parameters that were not used in producing loss. You can enable unused "
        "parameter detection by (1) passing the keyword argument `find_unused_parameters=True`",
        "RuntimeError: Expected to mark a variable ready only once. This error is caused by one of the following "
        "reasons: 1) Use of a module parameter outside the `forward` function.",
        "Parameter at index 50 with name layer4.1.bn2.weight has been marked as ready twice. This means that multiple "
        "autograd engine  hooks have fired for this particular parameter during this iteration.",
        "Parameter at index 73 has been marked as ready twice.",
        "RuntimeError: Your training graph has changed in this iteration, e.g., one parameter is unused in first "
        "iteration, but then got used in the second iteration. this is not compatible with static_graph set to True.",
        "Parameter indices which did not receive grad for rank 0: 1",
        "Parameters which did not receive grad for rank 3: net2.weight, net2.bias",
        "RuntimeError: It looks like your LightningModule has parameters that were not used in producing the loss "
        "returned by training_step. If this is intentional, you must enable the detection of unused parameters in DDP",
        "AssertionError: The parameter 447 has already been reduced. Gradient computed twice for this partition. "
        "Multiple gradient reduction is currently not supported",
    )
    misses = (
        "[W reducer.cpp:1300] Warning: find_unused_parameters=True was specified in DDP constructor, but did not find "
        "any unused parameters in the forward pass. This flag results in an extra traversal of the autograd graph",
        "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` outputs participate",
        "UserWarning: None of the inputs have requires_grad=True. Gradients will be None",
    )

"""Which GPU is whose: is it free, is it one rank's alone, can each rank get one?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped, warned
from allranks.causes.gpu.seen import gpu_facts, name_of, visible_gpus
from allranks.causes.node.presence import is_same_machine
from allranks.causes.sign import Blames, Role, Sign
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class GpuBusy(Cause, id="AR104"):
    """Somebody else's process is on a GPU.

    ## What it means
    Before the job's workers start, there is a process with memory on the GPU: left over from an earlier job, of a user
    beside the scheduler, or of another job that was given the same GPU.

    ## Why it breaks the job
    The memory it holds is missing: out of memory on one rank of many, at the first large batch. The time it takes is
    missing, too, and all ranks wait for this one. In mode Exclusive_Process the rank gets no GPU at all.

    ## Example
    From pytorch/pytorch#100691:

        RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable

    ## Fix
    See whose it is:

        nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv
        ps -o user,lstart,cmd -p PID

    Yours, of a job that is over: `kill PID`. Of somebody else: tell the admin; an epilog that kills what is left, and
    `ConstrainDevices=yes` in cgroup.conf, keep it from happening again. Meanwhile: `--exclude=NODE`.

    ## Source
    SLURM, cgroup.conf(5), ConstrainDevices: https://slurm.schedmd.com/cgroup.conf.html.
    """

    message = "{gpu}: {used} MiB of {total} MiB in use{who}"
    told = "a GPU is not free: another process has it, or it is kept for one process"
    fix = "on {node}: nvidia-smi shows the process; end it, or leave the node out: --exclude={node}"
    exit_code = Exit.NODE_FAULT
    signs = (
        Sign(r"CUDA-capable device\(s\) is/are busy or unavailable", Role.LIKELY),  # or the GPU is broken
        Sign(r"all CUDA-capable devices are busy or unavailable"),
        Sign(r"cudaErrorDevicesUnavailable"),
        Sign(r"CUDA_ERROR_DEVICE_UNAVAILABLE"),
        Sign(r"exclusive-thread device already in use by a different thread"),
    )
    hits = (
        "RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable",
        "cudaErrorDevicesUnavailable: CUDA-capable device(s) is/are busy or unavailable",
        "CUDA_ERROR_DEVICE_UNAVAILABLE: CUDA-capable device(s) is/are busy or unavailable",
        "RuntimeError: CUDA error: exclusive-thread device already in use by a different thread",
        "RuntimeError: cuda runtime error (46) : all CUDA-capable devices are busy or unavailable at THCGeneral.cpp:50",
    )
    misses = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",)
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails where other processes hold over 30 % of a GPU's memory; warns of any, and of memory nobody owns."""
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        worst = PASSED
        for gpu in visible_gpus(facts):
            used, total = gpu.memory_used_mib or 0, gpu.memory_total_mib or 0
            is_much = used > 0.3 * total > 0
            if not gpu.processes and not is_much:
                continue
            who = "" if gpu.processes else ", by no process that can be seen from here"
            values: dict[str, Any] = {"gpu": name_of(gpu), "used": used, "total": total or "?", "who": who}
            if gpu.processes and is_much:
                return failed(*gpu.processes[:4], **values)
            if worst is PASSED:
                worst = warned(*gpu.processes[:4], **values)
        return worst


class DuplicateGpu(Cause, id="AR107"):
    """Two ranks would use the same GPU.

    ## What it means
    CUDA_VISIBLE_DEVICES names a GPU twice, two agents on one machine see the same GPUs, or two nodes show a GPU with
    one and the same serial number.

    ## Why it breaks the job
    NCCL refuses a group in which two ranks share a GPU, "invalid usage", and the line names ranks and no node. CUDA
    hides all GPUs from a process whose list names one twice. Often the script is the reason: it does not use
    LOCAL_RANK, and all ranks take GPU 0.

    ## Example
    From horovod/horovod#3949:

        init.cc:748 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3b000

    ## Fix
    In the script, before anything else touches CUDA:

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    In the batch script, see what each task gets: `srun bash -c 'hostname; echo $CUDA_VISIBLE_DEVICES'`. Take back what
    .bashrc or the script sets: `unset CUDA_VISIBLE_DEVICES`. One agent a node: `--ntasks-per-node=1`.

    ## Source
    NCCL 2.30, src/init.cc, "Duplicate GPU detected". CUDA programming guide 13, "CUDA Environment Variables".
    """

    message = "{what}"
    told = "two ranks use the same GPU"
    fix = "unset CUDA_VISIBLE_DEVICES, start one agent a node, and let each rank take the GPU of its LOCAL_RANK"
    exit_code = Exit.SETUP
    signs = (
        Sign(
            r"Duplicate GPU detected : rank (?P<rank>[0-9]+) and rank (?P<ranks>[0-9]+) both on CUDA device "
            r"(?P<gpu>[0-9a-f]+)",
            blames=Blames.NAMED,
        ),
        Sign(r"Multiple Ranks are using the same GPU/Partition"),
        # NCCL before 2.13 does not say to PyTorch what was wrong; as a group is made it is nearly always this.
        Sign(
            r"(?:ProcessGroupNCCL\.cpp|NCCLUtils\.[ch]pp):[0-9]+, invalid usage",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
    )
    hits = (
        "node01:4123:4190 [1] init.cc:1293 NCCL WARN Multiple Ranks are using the same GPU/Partition. Set "
        "NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this configuration.",
        "chifflot-7:67917:67949 [0] init.cc:748 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA "
        "device 3b000",
        "Duplicate GPU detected : rank 3 and rank 0 both on CUDA device f000",
        "RuntimeError: NCCL error in: ../torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp:1169, invalid usage, NCCL "
        "version 21.0.3",
    )
    also = ("AR009", "AR504", "AR410")
    no_fault_yet = "the lab's pretended GPUs each have their own serial number"
    never_on_hardware = True

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Fails where CUDA_VISIBLE_DEVICES names a GPU twice."""
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        said = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
        twice = [entry for entry, times in Counter(filter(None, map(str.strip, said.split(",")))).items() if times > 1]
        if twice:
            return failed(what=f"CUDA_VISIBLE_DEVICES={said} names {twice[0]} twice, and CUDA then hides all")
        return PASSED

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails where two machines show one serial number, warns where two agents of one machine see the same GPU."""
        owners: dict[str, list[Card]] = defaultdict(list)
        for card in cards:
            if card.facts is None:
                continue
            for gpu in visible_gpus(card.facts):
                if gpu.uuid and gpu.mig_mode != "Enabled" and card not in owners[gpu.uuid]:
                    owners[gpu.uuid].append(card)
        found: dict[tuple[str, ...], Outcome] = {}
        for uuid, same in owners.items():
            if len(same) < 2:
                continue
            one, other = (card.facts for card in same[:2])
            hosts = tuple(card.host for card in same)
            if one and other and is_same_machine(one, other):
                found.setdefault(hosts, warned(what=f"{len(same)} agents on one machine both see {uuid}"))
            else:
                found.setdefault(hosts, failed(what=f"{len(same)} nodes show one and the same GPU, {uuid}"))
        return list(found.items())


class GpuBinding(Cause, id="AR108"):
    """CUDA_VISIBLE_DEVICES leaves too few GPUs for the workers.

    ## What it means
    The node has enough GPUs; the variable shows the workers fewer than there are workers.

    ## Why it breaks the job
    The ranks above that number fail with "invalid device ordinal", or share a GPU with another rank. It comes from a
    line in .bashrc or the batch script, or from SLURM's binding: with `--gpus-per-task=1` and one task a node SLURM
    shows one GPU.

    ## Example
    From cudaErrorInvalidDevice's text in CUDA 13:

        RuntimeError: CUDA error: invalid device ordinal

    ## Fix
    See who sets it:

        srun --ntasks-per-node=1 bash -c 'hostname; echo $CUDA_VISIBLE_DEVICES'; grep -n CUDA_VISIBLE ~/.bashrc

    Ask for the node's GPUs and not for a task's: `--gpus-per-node=8` (or `--gres=gpu:8`) with one task a node, or
    `--gpu-bind=none`.

    ## Source
    SLURM, "Generic resource scheduling": https://slurm.schedmd.com/gres.html (23.11).
    """

    message = "CUDA_VISIBLE_DEVICES={said} shows {visible} of {present} GPUs to {workers} workers"
    fix = "unset CUDA_VISIBLE_DEVICES, or ask SLURM for the node's GPUs: --gpus-per-node, not --gpus-per-task"
    no_fault_yet = "the lab's nodes have one pretended GPU each"
    never_on_hardware = True
    told = "SLURM binds a task to GPUs that its job does not have"
    also = ("AR106", "AR501", "AR107")
    signs = (
        Sign(r"does not specify any devices within the allocation"),
        # NCCL before 2.10 opens a GPU's memory only where both processes see both GPUs.
        Sign(
            r"failed to open CUDA IPC handle : (?:[0-9]+ )?(?:peer access is not supported|invalid device)",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        # Open MPI, CUDA IPC: the other process's GPU is not among those that this one sees.
        Sign(r"The call to cuIpc(?:OpenMem|GetMem)Handle failed", Role.LIKELY, confidence=Confidence.UNDECIDED),
        Sign(r"^ *Hostname: +(?P<node>[A-Za-z0-9_.-]{1,80})\s*$", Role.CONTEXT, Blames.NAMED),
        Sign(r"--gpu-bind=(?:closest|single|per_task|map|mask)", Role.CONTEXT),
        Sign(r"--gpus-per-task[= ][0-9]", Role.CONTEXT),
    )
    hits = (
        "srun --nodes=1 --ntasks-per-node=4 --gpus-per-node=4 --gpu-bind=closest python train.py",
        "srun -n 8 --gpus-per-task=1 python train.py",
        "z-pc:909608:910337 [0] transport/p2p.cc:238 NCCL WARN failed to open CUDA IPC handle : 217 peer access is not "
        "supported between these two devices",
        "The call to cuIpcOpenMemHandle failed. This is an unrecoverable error",
        "  Hostname:                         clima",
        "slurmstepd: error: Bind request 3 (0x8) does not specify any devices within the allocation. Binding to the "
        "first device in the allocation instead.",
    )

    @classmethod
    def probe(cls, card: Card) -> Outcome:
        """Warns where the variable shows fewer GPUs than workers although the node has enough; Gloo needs none."""
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        if card.wanted_backend == "gloo":
            return skipped("the backend is gloo")
        said = facts.environment.get("CUDA_VISIBLE_DEVICES")
        visible, present = len(visible_gpus(facts)), len(facts.gpus)
        if said is not None and "MIG-" not in said and visible < card.num_workers <= present:
            return warned(said=said, visible=visible, present=present, workers=card.num_workers)
        return PASSED


class BackendDeviceMismatch(Cause, id="AR111"):
    """The backend does not fit the devices that the nodes have.

    ## What it means
    NCCL moves data between GPUs and needs one for each rank. Some node has fewer GPUs than ranks, or none.

    ## Why it breaks the job
    The ranks without a GPU fail when the group is formed, or when the first tensor of theirs is reduced; the others
    wait. Where each node chooses its backend by itself, some come with NCCL and some with Gloo, and nobody meets.

    ## Example
    From torch/csrc/distributed/c10d (2.13); the second for a tensor on the CPU in a group of NCCL alone:

        ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!
        RuntimeError: No backend type associated with device type cpu

    ## Fix
    GPUs are expected: `nvidia-smi` on the named nodes; `sbatch --gpus-per-node=N`. None are expected: `--backend gloo`,
    or `backend = "gloo"` in cluster.toml. Tensors on both: `init_process_group("cpu:gloo,cuda:nccl")`, which is what
    PyTorch does when no backend is named.

    ## Source
    PyTorch, "Distributed communication package", backends: https://docs.pytorch.org/docs/stable/distributed.html
    (2.13).
    """

    message = "{what}"
    told = "the backend does not fit the device of the tensors, or of the node"
    fix = "nvidia-smi on those nodes (is the driver loaded?), or --backend gloo"
    exit_code = Exit.SETUP
    signs = (
        Sign(r"ProcessGroupNCCL is only supported with GPUs, no GPUs found"),
        Sign(r"No backend type associated with device type (?P<device>[a-z]+)"),
        Sign(r"ensors? must be CUDA and dense"),
        Sign(r"ProcessGroupGloo::[a-z_]{3,30}: (?:unsupported device type|unsupported layout|invalid tensor type)"),
        Sign(r"the MPI used doesn't have CUDA-aware MPI support"),
        Sign(r"Distributed package doesn't have (?:NCCL|Gloo|MPI|UCC|XCCL) built in"),
        Sign(r"ProcessGroup(?:NCCL|Gloo|MPI) does not support ", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Backend (?:nccl|gloo|mpi) does not support ", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"DistributedDataParallel device_ids and output_device arguments only work with",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
    )
    hits = (
        "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!",
        "RuntimeError: No backend type associated with device type cpu",
        "RuntimeError: Tensors must be CUDA and dense",
        "ValueError: ProcessGroupGloo::allreduce: unsupported device type",
        "RuntimeError: CUDA tensor detected and the MPI used doesn't have CUDA-aware MPI support",
        "RuntimeError: Distributed package doesn't have NCCL built in",
        "RuntimeError: ProcessGroupNCCL does not support send",
        "RuntimeError: Backend nccl does not support gather",
        "ValueError: DistributedDataParallel device_ids and output_device arguments only work with single-device/"
        "multiple-device GPU modules or CPU modules, but got device_ids [0]",
    )
    misses = ("ValueError: ProcessGroupXCCL is only supported with GPUs, no GPUs found!",)
    no_fault_yet = "the launcher finds it from the plan; tests/lab asks for nccl on nodes without a GPU"

"""Which rank uses which GPU: is it free, does no other rank use it, and are there enough?"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from allranks.causes.cause import PASSED, Cause, Outcome, failed, skipped, warned
from allranks.causes.gpu.seen import gpu_facts, name_of, visible_gpus
from allranks.causes.node.presence import is_same_machine
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.card import Card
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class GpuBusy(Cause, id="AR104"):
    """Another process uses a GPU of this job.

    ## What it means
    Before the job's workers start, some process already holds memory on the GPU. It is left over from an earlier job,
    runs outside the scheduler, or belongs to another job that was given the same GPU.

    ## Why it breaks the job
    The job lacks the memory that the process holds, and one rank of many runs out of memory at the first large batch.
    The process also takes compute time, and all ranks wait for this one. In mode Exclusive_Process the rank gets no GPU
    at all.

    ## Example
    From pytorch/pytorch#100691:

        RuntimeError: CUDA error: CUDA-capable device(s) is/are busy or unavailable

    ## Fix
    Find the owner of the process:

        nvidia-smi --query-compute-apps=pid,used_memory,name --format=csv
        ps -o user,lstart,cmd -p PID

    If it is left over from a job of yours, run `kill PID`. If it belongs to somebody else, tell the admin. To prevent
    it, let an epilog kill leftover processes, and set `ConstrainDevices=yes` in cgroup.conf. Until then:
    `--exclude=NODE`.

    ## Source
    SLURM, cgroup.conf(5), ConstrainDevices: https://slurm.schedmd.com/cgroup.conf.html.
    """

    message = "{used} MiB of {total} MiB of {gpu} are already in use{who}"
    told = "the GPU is not free: another process uses it, or it accepts only one process"
    fix = "on {node}: nvidia-smi lists the process; end it (kill PID), or exclude the node: --exclude={node}"
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
        """Fails if other processes hold over 30 % of a GPU's memory; warns about less, or about ownerless memory."""
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        worst = PASSED
        for gpu in visible_gpus(facts):
            used, total = gpu.memory_used_mib or 0, gpu.memory_total_mib or 0
            is_much = used > 0.3 * total > 0
            if not gpu.processes and not is_much:
                continue
            who = "" if gpu.processes else "; no process visible here owns them"
            values: dict[str, Any] = {"gpu": name_of(gpu), "used": used, "total": total or "?", "who": who}
            if gpu.processes and is_much:
                return failed(*gpu.processes[:4], **values)
            if worst is PASSED:
                worst = warned(*gpu.processes[:4], **values)
        return worst


class DuplicateGpu(Cause, id="AR107"):
    """Two ranks would use the same GPU.

    ## What it means
    CUDA_VISIBLE_DEVICES lists a GPU twice, two agents on one machine see the same GPUs, or two nodes show a GPU with
    the same serial number.

    ## Why it breaks the job
    NCCL rejects a group in which two ranks share a GPU ("invalid usage"), with a line that names ranks but no node.
    CUDA hides all GPUs from a process whose list has a duplicate. Often the script is the cause: it ignores LOCAL_RANK,
    and all ranks use GPU 0.

    ## Example
    From horovod/horovod#3949:

        init.cc:748 NCCL WARN Duplicate GPU detected : rank 0 and rank 1 both on CUDA device 3b000

    ## Fix
    In the script, before any other CUDA call:

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))

    In the batch script, show what each task gets: `srun bash -c 'hostname; echo $CUDA_VISIBLE_DEVICES'`. Remove the
    variable where .bashrc or the script sets it: `unset CUDA_VISIBLE_DEVICES`. Start one agent per node:
    `--ntasks-per-node=1`.

    ## Source
    NCCL 2.30, src/init.cc, "Duplicate GPU detected". CUDA programming guide 13, "CUDA Environment Variables".
    """

    message = "{what}"
    told = "two ranks use the same GPU"
    fix = (
        "unset CUDA_VISIBLE_DEVICES; start one agent per node; in the script: "
        'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))'
    )
    exit_code = Exit.SETUP
    traits = frozenset({Trait.NORMAL_AMONG_RANKS})
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
        """Fails if CUDA_VISIBLE_DEVICES lists a GPU twice."""
        facts = gpu_facts(card)
        if isinstance(facts, Outcome):
            return facts
        said = facts.environment.get("CUDA_VISIBLE_DEVICES", "")
        twice = [entry for entry, times in Counter(filter(None, map(str.strip, said.split(",")))).items() if times > 1]
        if twice:
            return failed(what=f"CUDA_VISIBLE_DEVICES={said} lists {twice[0]} twice, so CUDA hides all GPUs")
        return PASSED

    @classmethod
    def survey(cls, cards: Sequence[Card]) -> Sequence[tuple[tuple[str, ...], Outcome]]:
        """Fails if two machines show the same serial number; warns if two agents of one machine see the same GPU."""
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
                found.setdefault(hosts, failed(what=f"{len(same)} nodes show the same GPU, {uuid}"))
        return list(found.items())


class GpuBinding(Cause, id="AR108"):
    """CUDA_VISIBLE_DEVICES shows the workers too few GPUs.

    ## What it means
    The node has enough GPUs, but the variable shows fewer GPUs than there are workers.

    ## Why it breaks the job
    The ranks above that number fail with "invalid device ordinal", or share a GPU with another rank. The cause is a
    line in .bashrc or in the batch script, or SLURM's binding: with `--gpus-per-task=1` and one task per node, SLURM
    shows one GPU.

    ## Example
    The text of cudaErrorInvalidDevice in CUDA 13:

        RuntimeError: CUDA error: invalid device ordinal

    ## Fix
    Find where it is set:

        srun --ntasks-per-node=1 bash -c 'hostname; echo $CUDA_VISIBLE_DEVICES'; grep -n CUDA_VISIBLE ~/.bashrc

    Request GPUs per node instead of per task: `--gpus-per-node=8` (or `--gres=gpu:8`) with one task per node, or
    `--gpu-bind=none`.

    ## Source
    SLURM, "Generic resource scheduling": https://slurm.schedmd.com/gres.html (23.11).
    """

    message = "CUDA_VISIBLE_DEVICES={said} shows only {visible} of {present} GPUs to {workers} workers"
    fix = "unset CUDA_VISIBLE_DEVICES, or request GPUs per node: --gpus-per-node={workers} instead of --gpus-per-task"
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
        """Warns if the variable shows fewer GPUs than workers although the node has enough; Gloo needs none."""
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
    """The backend does not match the devices of the nodes.

    ## What it means
    NCCL moves data between GPUs and needs one for each rank. A node has fewer GPUs than ranks, or none.

    ## Why it breaks the job
    The ranks without a GPU fail when the group is created, or at the first collective, and the others wait. If each
    node chooses its backend by itself, some use NCCL and some Gloo, and the ranks never meet.

    ## Example
    From torch/csrc/distributed/c10d (2.13); the second line appears for a CPU tensor in a group that has only NCCL:

        ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!
        RuntimeError: No backend type associated with device type cpu

    ## Fix
    If GPUs are expected, run `nvidia-smi` on the named nodes and submit with `sbatch --gpus-per-node=N`. If not, use
    `--backend gloo`, or `backend = "gloo"` in cluster.toml. For tensors on both, use
    `init_process_group("cpu:gloo,cuda:nccl")`; without a backend, PyTorch takes that of the accelerator alone.

    ## Source
    PyTorch, "Distributed communication package", backends: https://docs.pytorch.org/docs/stable/distributed.html
    (2.13).
    """

    message = "{what}"
    told = "the backend does not match the device of the tensors, or of the node"
    fix = "on {node}: nvidia-smi shows whether the driver is loaded; to run without GPUs: --backend gloo"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.OF_ONE_CALL})
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

"""What a program did wrong with its GPU: it used a missing GPU, too much memory, or a wrong address."""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.gpu.xids import PROGRAM_XIDS, told_xid_patterns, xid_pattern
from allranks.causes.sign import Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class InvalidDevice(Cause, id="AR106"):
    """A rank uses a GPU that is not visible to it.

    ## What it means
    The program names a GPU by a number, and fewer GPUs are visible to this process. The node may have enough of them:
    CUDA_VISIBLE_DEVICES, SLURM's binding or a container shows the process only some, numbered from 0.

    ## Why it breaks the job
    The rank fails before it joins the group, and the others wait for it. Common reasons are more processes on the node
    than GPUs, the global rank used in place of LOCAL_RANK, `--gpus-per-task=1` together with `set_device(LOCAL_RANK)`,
    and a checkpoint that was saved on `cuda:3` and is loaded without `map_location`.

    ## Example
    From a Lightning job on two nodes with two GPUs each, in which every task had LOCAL_RANK 0:

        RuntimeError: CUDA error: invalid device ordinal

    ## Fix
    Show what each task gets:

        srun bash -c 'hostname; echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES; nvidia-smi -L'

    Start as many processes as GPUs (`--nproc-per-node`, `--ntasks-per-node`). In the script, call
    `torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))`. Load checkpoints with `map_location="cpu"`.

    ## Source
    cudaErrorInvalidDevice = 101 (10 before CUDA 10.1), texts of the CUDA Runtime API 8 to 13.
    PyTorch, torch/serialization.py, c10/cuda/CUDAException.cpp (2.13 and older, read 2026-11-21).
    """

    message = "a rank uses a GPU that is not visible to it"
    fix = (
        "start as many workers per node as GPUs, call torch.cuda.set_device(LOCAL_RANK), and submit with "
        "--gpus-per-node"
    )
    told = "a rank uses a GPU that is not visible to it"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.OF_ONE_CALL})
    also = ("AR108",)
    no_fault_yet = "the lab's nodes have one pretended GPU each, which no program can open"
    signs = (
        Sign(r"invalid device ordinal"),
        Sign(r"cudaErrorInvalidDevice\b"),
        Sign(r"CUDA_ERROR_INVALID_DEVICE\b"),
        Sign(r"GPU device may be out of range, do you have enough GPUs"),
        Sign(
            r"Attempting to deserialize object on CUDA device (?P<gpu>[0-9]+) but "
            r"torch\.cuda\.device_count\(\) is (?P<present>[0-9]+)"
        ),
        Sign(r"AssertionError: Invalid device id"),
        Sign(r"device < num_gpus INTERNAL ASSERT FAILED(?:.{0,200} device=(?P<gpu>[0-9]+), num_gpus=)?"),
        Sign(r"You requested gpu: \[", confidence=Confidence.LIKELY),
        Sign(r"But your machine only has: \[", confidence=Confidence.LIKELY),
        Sign(r"Invalid CUDA 'device=(?P<gpu>[0-9,]+)' requested"),
        Sign(r"No slot '(?P<gpu>[0-9]+)' specified on host '(?P<node>[^']{1,80})'"),
    )
    hits = (
        "RuntimeError: CUDA error: invalid device ordinal",
        "RuntimeError: cuda runtime error (10) : invalid device ordinal at torch/csrc/cuda/Module.cpp:32",
        "gpu-node:2144:2556 [7] init.cc:1204 NCCL WARN Cuda failure 101 'invalid device ordinal'",
        "cudaErrorInvalidDevice: invalid device ordinal",
        "cuDeviceGet failed: CUDA_ERROR_INVALID_DEVICE: invalid device ordinal",
        "GPU device may be out of range, do you have enough GPUs?",
        "RuntimeError: Attempting to deserialize object on CUDA device 3 but torch.cuda.device_count() is 1. Please "
        "use torch.load with map_location to map your storages to an existing device.",
        "AssertionError: Invalid device id",
        "RuntimeError: device >= 0 && device < num_gpus INTERNAL ASSERT FAILED at "
        '"../aten/src/ATen/cuda/CUDAContext.cpp"'
        ":50, please report a bug to PyTorch. device=1, num_gpus=",
        "pytorch_lightning.utilities.exceptions.MisconfigurationException: You requested gpu: [0, 1, 2, 3]",
        " But your machine only has: [0]",
        "ValueError: Invalid CUDA 'device=0,1' requested. Use 'device=cpu' or pass valid CUDA device(s) if available",
        "ValueError: No slot '3' specified on host 'localhost'",
    )
    misses = (
        "LOCAL_RANK: 0 - CUDA_VISIBLE_DEVICES: [0,1]",
        "[W ProcessGroupNCCL.cpp:4115] [PG 0 Rank 0] using GPU 0 to perform barrier as devices used by this process "
        "are currently unknown. This can potentially cause a hang if this rank to GPU mapping is incorrect.",
    )


class CudaOom(Cause, id="AR109"):
    """A rank ran out of GPU memory.

    ## What it means
    The program requested more memory than is free on its GPU: for weights, gradients, optimizer state and activations,
    or for the buffers of NCCL, cuBLAS and cuDNN, which do not come from PyTorch's pool.

    ## Why it breaks the job
    The rank fails with an exception, and the others wait for it. Often only one rank fails: it has the longest
    sequence, it gathers a checkpoint, or another user's process runs on its GPU.

    ## Example
    From torch/c10/cuda/CUDACachingAllocator.cpp; the first line until 2.0, the second since 2.1:

        RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 39.59 GiB total capacity; 35.51 GiB already allocated; 1.17 GiB free; 36.79 GiB reserved in total by PyTorch)
        torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 GiB of which 1.17 GiB is free. Process 21044 has 77.98 GiB memory in use.

    ## Fix
    Find out which process has the memory: run `nvidia-smi` on that node; the message names other processes. If it is
    only yours, use a smaller batch per rank with more gradient accumulation, activation checkpointing, sharding (FSDP,
    ZeRO) or shorter sequences. If much is reserved and little allocated, memory is fragmented:

        export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

    If it grows from step to step, something keeps the autograd graph, often a sum of `loss` without `.item()`.

    ## Source
    PyTorch, c10/cuda/CUDACachingAllocator.cpp (2.13 and older); "CUDA semantics", memory management:
    https://docs.pytorch.org/docs/stable/notes/cuda.html. NCCL, src/include/alloc.h (several versions). Read 2026-11-21.
    """  # noqa: E501  (real lines)

    message = "a rank ran out of GPU memory"
    fix = (
        "on {node}: nvidia-smi shows other processes on the GPU; if there are none: smaller batch, activation "
        "checkpointing, sharding"
    )
    told = "a rank ran out of GPU memory"
    exit_code = Exit.USER_CODE
    no_fault_yet = "the lab has no GPU"
    signs = (
        Sign(
            r"out of memory\. Tried to allocate (?P<wanted>[0-9.]+ [KMGT]?i?[Bb][a-z]{0,4}) "
            r"\(GPU (?P<gpu>[0-9]+); (?P<present>[0-9.]+ [KMGT]?i?B) total capacity"
        ),
        Sign(
            r"out of memory\. Tried to allocate (?P<wanted>[0-9.]+ [KMGT]?i?[Bb][a-z]{0,4})\. "
            r"GPU (?P<gpu>[0-9]+) has a total capaci?ty of (?P<present>[0-9.]+ [KMGT]?i?B)"
        ),
        Sign(r"(?:CUDA|HIP|XPU|NPU) out of memory\. Tried to allocate"),
        Sign(r"(?:CUDA|HIP) out of memory", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Allocation on device (?P<gpu>[0-9]+) would exceed allowed memory"),
        Sign(r"OutOfMemoryError: Allocation on device"),
        Sign(r"CUDA (?:driver )?error: out of memory"),
        Sign(r"cuda runtime error \(2\) : out of memory"),
        Sign(r"Cuda failure (?:[0-9]+ )?'out of memory'"),
        Sign(r"Failed to CUDA [a-z ]{0,12}alloc", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"cudaErrorMemoryAllocation"),
        Sign(r"CUDA_ERROR_OUT_OF_MEMORY"),
        Sign(r"(?:CUBLAS|CUDNN|CUSOLVER|CUSPARSE)_STATUS_ALLOC_FAILED", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"(?:CUBLAS|CUDNN)_STATUS_NOT_INITIALIZED",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(r"OOM when allocating tensor"),
        *(
            Sign(
                rf"{word}: (?:Out of memory|Failed to allocate request for [0-9.]{{1,8}}[KMG]?i?B \([0-9]+B\) on "
                r"device ordinal (?P<gpu>[0-9]+))"
            )
            for word in ("RESOURCE_EXHAUSTED", "Resource exhausted")
        ),
        Sign(r"Allocator \(GPU_(?P<gpu>[0-9]+)_bfc\) ran out of memory trying to allocate", Role.CONTEXT),
    )
    hits = (
        "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB (GPU 3; 39.59 GiB total capacity; 35.51 GiB "
        "already allocated; 1.17 GiB free; 36.79 GiB reserved in total by PyTorch)",
        "torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacty of "
        "23.69 GiB of which 9.06 MiB is free. Process 1881 has 23.67 GiB memory in use.",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.15 "
        "GiB of which 1.17 GiB is free.",
        "torch.OutOfMemoryError: HIP out of memory. Tried to allocate 256.00 MiB. GPU 5 has a total capacity of 63.98 "
        "GiB",
        "RuntimeError: CUDA error: out of memory",
        "RuntimeError: CUDA driver error: out of memory",
        "RuntimeError: Allocation on device 0 would exceed allowed memory. (out of memory)",
        "torch.OutOfMemoryError: Allocation on device ",
        "RuntimeError: cuda runtime error (2) : out of memory at /pytorch/aten/src/THC/THCCachingHostAllocator.cpp:278",
        "gpu-node-2:2143:2561 [1] include/alloc.h:48 NCCL WARN Cuda failure 'out of memory'",
        "gpu-node-2:2143:2561 [1] include/alloc.h:186 NCCL WARN Cuda failure 2 'out of memory'",
        "gpu-node-2:2143:2561 [1] include/alloc.h:271 NCCL WARN Failed to CUDA calloc async 608 bytes",
        "cudaErrorMemoryAllocation: out of memory",
        "could not allocate CUDA stream for context 0x5: CUDA_ERROR_OUT_OF_MEMORY: out of memory",
        "RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "RuntimeError: cuDNN error: CUDNN_STATUS_NOT_INITIALIZED",
        "ResourceExhaustedError: OOM when allocating tensor with shape[64,512,512] and type float on "
        "/job:localhost/GPU:0",
        "jaxlib.xla_extension.XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 8589934592 "
        "bytes.",
        "RuntimeError: Resource exhausted: Failed to allocate request for 32.00MiB (33554432B) on device ordinal 0",
        "W tensorflow/core/common_runtime/bfc_allocator.cc:479] Allocator (GPU_0_bfc) ran out of memory trying to "
        "allocate 2.00GiB (rounded to 2147483648)requested by op Conv2D",
    )
    misses = (
        "kernel: Memory cgroup out of memory: Killed process 21044 (python3) total-vm:812345678kB, anon-rss:1024kB",
        "peak_memory_bytes: 11,105,720,320",
        "[ 98123.4] Out of memory: Killed process 21044 (python) total-vm:812345678kB",
    )


class CudaIllegalAccess(Cause, id="AR110"):
    """A GPU kernel failed: illegal access, assertion or launch failure.

    ## What it means
    Code on the GPU accessed memory that it may not, failed an assertion (such as an index out of range), or was
    stopped. The CUDA context of the process is lost: every later CUDA call of this process fails with the same text.

    ## Why it breaks the job
    The rank fails, often in NCCL's watchdog, which was only the next to call CUDA. Kernel errors are reported late, so
    the Python traceback may show an unrelated line. In most cases the program or a library's kernel is wrong. If the
    same program fails on one node only, or always on the same GPU, suspect the hardware (AR105).

    ## Example
    From torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp and ATen's kernels (2.x):

        [rank0]:[E520 10:44:08 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered
        /pytorch/aten/src/ATen/native/cuda/Indexing.cu:1422: indexSelectSmallIndex: block: [0,0,0], thread: [0,0,0] Assertion `srcIndex < srcSelectDimSize` failed.

    ## Fix
    Make the first failing rank report errors where they occur, and look for the address:

        export CUDA_LAUNCH_BLOCKING=1
        compute-sanitizer --tool memcheck python3 train.py

    After an assertion in an index or loss kernel, look for labels and token ids that are out of range (on the CPU the
    same call raises a readable error). If a library's kernel failed (flash-attention, Triton), try another version of
    it. If it is always the same GPU, run `dcgmi diag -r 3` there.

    ## Source
    CUDA Runtime API, error types 700, 702, 710, 715 to 719 (13.1). PyTorch, c10/cuda/CUDAException.cpp (2.13).
    Xids 13, 31, 43, 69, 137: NVIDIA's Xid catalogue,
    https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html. All read 2026-11-21.
    """  # noqa: E501  (real lines)

    message = "a GPU kernel failed: illegal access, assertion or launch failure"
    fix = (
        "set CUDA_LAUNCH_BLOCKING=1, then run that rank under compute-sanitizer; if only one node fails, check its "
        "GPU (AR105)"
    )
    told = "a GPU kernel failed: illegal access, assertion or launch failure"
    exit_code = Exit.USER_CODE
    traits = frozenset({Trait.OF_ONE_CALL})
    no_fault_yet = "the lab has no GPU"
    also = ("AR105",)
    signs = (
        Sign(r"an illegal memory access was encountered"),
        Sign(r"device-side assert triggered"),
        Sign(r"block: \[[0-9]+,[0-9]+,[0-9]+\], thread: \[[0-9]+,[0-9]+,[0-9]+\] Assertion "),
        Sign(r"unspecified launch failure"),
        Sign(r"misaligned address"),
        Sign(r"Memory access fault by GPU (?P<gpu>node-[0-9]+) \(Agent handle: "),  # ROCm
        Sign(r"an illegal instruction was encountered"),
        Sign(r"operation not supported on global/shared address space"),
        Sign(r"invalid program counter"),
        Sign(r"the launch timed out and was terminated", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(
            r"CUDA_ERROR_(?:ILLEGAL_ADDRESS|ILLEGAL_INSTRUCTION|MISALIGNED_ADDRESS|INVALID_ADDRESS_SPACE|INVALID_PC|"
            r"LAUNCH_FAILED|ASSERT)\b"
        ),
        Sign(
            r"cudaError(?:IllegalAddress|IllegalInstruction|MisalignedAddress|InvalidAddressSpace|InvalidPc|"
            r"LaunchFailure|Assert)\b"
        ),
        Sign(
            r"(?:CUBLAS|CUDNN)_STATUS_(?:EXECUTION_FAILED|INTERNAL_ERROR|MAPPING_ERROR)",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(
            xid_pattern(PROGRAM_XIDS) + r"(?:, pid='?(?P<pid>[0-9]+))?",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        *(Sign(told, Role.LIKELY, confidence=Confidence.LIKELY) for told in told_xid_patterns(PROGRAM_XIDS)),
    )
    hits = (
        "[rank0]:[E520 10:44:08.389636235 ProcessGroupNCCL.cpp:1896] [PG ID 0 PG GUID 0(default_pg) Rank 0] Process "
        "group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered",
        "RuntimeError: cuda runtime error (77) : an illegal memory access was encountered at "
        "/pytorch/aten/THCBlas.cu:259",
        "gpu-node-2:2143:2561 [1] enqueue.cc:1186 NCCL WARN Cuda failure 700 'an illegal memory access was "
        "encountered'",
        "RuntimeError: CUDA error: device-side assert triggered",
        "/pytorch/aten/src/ATen/native/cuda/Indexing.cu:1422: indexSelectSmallIndex: block: [0,0,0], thread: [0,0,0] "
        "Assertion `srcIndex < srcSelectDimSize` failed.",
        "../aten/src/ATen/native/cuda/Loss.cu:242: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: "
        "[3,0,0] Assertion `t >= 0 && t < n_classes` failed.",
        "RuntimeError: CUDA error: unspecified launch failure",
        "torch.AcceleratorError: CUDA error: misaligned address",
        "Memory access fault by GPU node-2 (Agent handle: 0x5640a8bb1980) on address 0x7feea09c5000. Reason: Page not "
        "present or supervisor privilege.",
        "RuntimeError: CUDA error: an illegal instruction was encountered",
        "RuntimeError: CUDA error: operation not supported on global/shared address space",
        "RuntimeError: CUDA error: invalid program counter",
        "RuntimeError: CUDA error: the launch timed out and was terminated",
        "Error: CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered",
        "cudaErrorLaunchFailure: unspecified launch failure",
        "RuntimeError: CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx( handle, opa, opb, m, n, "
        "k)`",
        "NVRM: Xid (PCI:0000:44:00): 13, pid=812, Graphics Exception: ESR 0x404490=0x80000001",
        "NVRM: Xid (PCI:0000:c1:00): 31, pid=21044, name=python3, Ch 00000008, intr 00000000. MMU Fault: ENGINE "
        "GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f10_c0de4000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_READ",
        "NVRM: Xid (0000:03:00): 43, Ch 00000010, engmask 00000101",
        "Detected XID 31 for GPU 4 Please consult the documentation for details of this XID.",
        "XidCriticalError: Xid=31 on Device=GPU-8dfc3a6a; marking device as unhealthy.",
    )
    misses = (
        "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
        "incorrect. For debugging consider passing CUDA_LAUNCH_BLOCKING=1.",
        "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.",
        "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus",
        "NVRM: Xid (PCI:0000:44:00): 136, Link training failed",
    )

"""Can files be read: does a file system hang, is a handle stale, is shared memory full?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_PS_LINE = (
    r" (?P<pid>[0-9]{2,8}) {1,4}[0-9.]{1,6} {1,4}[0-9.]{1,6} {1,8}[0-9]{1,14} {1,8}[0-9]{1,12} [^ ]{1,8} {1,6}"
    r"D[<NLsl+]{0,4} {1,4}[^ ]{4,6} {1,4}[0-9]{1,5}:[0-9]{2}"
)
"""A line of `ps aux` up to its command: a process in state D."""
_PS_WAITS = r"(?P<pid>[0-9]{2,8}) {1,4}D[<NLsl+]{0,4} {1,4}"
"""A line of `ps -o pid,stat,wchan` up to where in the kernel the process waits."""
_PLACES = ("nfs_start_io", "rpc_wait_bit", "do_truncate", "cl_sync_io", "request_wait_answer")
"""Of NFS, SUNRPC, any file system, Lustre, FUSE."""


class NfsStale(Cause, id="AR605"):
    """An open file on the shared file system was replaced or deleted (stale handle).

    ## What it means
    NFS identifies a file by a handle of the server. Another node replaced or deleted the file, the export was moved, or
    the server was restored. The handle on this node is no longer valid, and each access fails with ESTALE (116).

    ## Why it breaks the job
    Reads and writes of that file fail with OSError on this node, while other nodes may still see it. Log files,
    checkpoints that another rank rotates, and virtual environments that are rebuilt during a job are affected most
    often.

    ## Example
    From a checkpoint on a mounted NAS:

        OSError: [Errno 116] Unable to synchronously create file (unable to fstat file, errno = 116, error message = 'Stale file handle')

    ## Fix
    Close the file and open it again; restarting the job does that. If the mount point itself is stale:

        findmnt -t nfs,nfs4; sudo umount -l DIRECTORY && sudo mount DIRECTORY

    Let one rank write and rotate checkpoints, with unique names. Do not rebuild the environment of a running job.

    ## Source
    Linux, errno(3), ESTALE; glibc's text is "Stale file handle", once "Stale NFS file handle". Linux NFS FAQ, A10:
    https://nfs.sourceforge.net/. Neither was checked again.
    """  # noqa: E501  (a real line)

    message = "an open file on the shared file system was replaced or deleted (stale file handle)"
    told = "an open file on the shared file system was replaced or deleted (stale file handle)"
    fix = (
        "restart the job; if the mount point is stale, remount it; let one rank write and rotate files, with unique "
        "names"
    )
    exit_code = Exit.NODE_FAULT
    signs = (
        Sign(r"\[Errno 116\] Stale (?:NFS )?file handle: b?'(?P<thing>[^']{1,300})(?:'|$)"),
        Sign(
            r"cannot [a-z]{3,12}(?: [a-z]{2,12}){0,2} ['`]?(?P<thing>[./~][^':`]{0,300})['`]?: "
            r"Stale (?:NFS )?file handle"
        ),
        Sign(r"Stale (?:NFS )?file handle"),
        Sign(r"\[Errno 116\]"),
        Sign(r"errno = 116\b"),
        Sign(r"\bESTALE\b", Role.LIKELY),
        Sign(r"NFS: server (?P<thing>[^ ]{1,200}) error: fileid changed", Role.LIKELY, confidence=Confidence.LIKELY),
    )
    hits = (
        "NFS: server fs01 error: fileid changed",
        "OSError: [Errno 116] Stale file handle: '/mnt/nas/run/checkpoint-500'",
        "OSError: [Errno 116] Stale NFS file handle",
        "OSError: [Errno 116] Unable to synchronously create file (unable to fstat file, errno = 116, error message = "
        "'Stale file handle')",
        "rm: cannot remove '/home/user/run/.nfs0001': Stale file handle",
        "OSError: [Errno 116] Stale file handle: '/home/user/.cache/huggingface/datasets/",
        "ls: cannot access /mnt/dataset/: Stale file handle",
        "ls: cannot open directory '/mnt/dataset': Stale file handle",
        "Error: ESTALE: stale file handle, read",
    )
    misses = (
        "OSError: [Errno 16] Device or resource busy: '.nfs000000000012'",
        "FileNotFoundError: [Errno 2] No such file or directory: '/mnt/nas/run/checkpoint-500'",
    )
    no_fault_yet = "the lab has no NFS server"


class FilesystemHang(Cause, id="AR606"):
    """A file system does not answer, and a process waits for it in the kernel.

    ## What it means
    A read, write or stat on a shared file system (NFS, Lustre, GPFS, Ceph) does not return. The process is in state D:
    no signal ends it, and no timeout of Python or NCCL interrupts it.

    ## Why it breaks the job
    One rank stops at a log line, a data file or a checkpoint, and all others wait for it in the next collective. A
    watchdog's timeout may not fire on the stuck rank, because its process does not run.

    ## Example
    In a 64-GPU job that hung after 3.5 hours, `ps` showed rank 0 in state `D` while it wrote a log line. The kernel
    prints:

        INFO: task python:280058 blocked for more than 120 seconds.
        nfs: server 10.100.0.60 not responding, still trying
        Lustre: fs-OST0000-osc-ffff8: Connection to fs-OST0000 (at 10.0.1.5@tcp) was lost; in progress operations using this service will wait for recovery to complete

    ## Fix
    Find the waiting processes without touching the file system itself:

        ps -eo pid,stat,wchan:32,comm | awk '$2 ~ /^D/'; cat /proc/PID/stack; dmesg -T | tail -50

    Tell the admin the node, the mount and the time. Write logs and temporary files to a local disk, and copy
    checkpoints from there. The processes end when the server answers, or when the node reboots.

    ## Source
    Linux, kernel/hung_task.c, net/sunrpc/sched.c (rpc_wait_bit_killable), fs/ceph/mds_client.c; Lustre, ptlrpc/import.c:
    console messages 0x166 and 0x167; SLURM, slurmstepd; py-spy, "Failed to suspend process" (read 2026-11-21). The
    NFS client's words are from public logs, GPFS's from one public log. ps(1), "Process state codes".
    """  # noqa: E501  (a real line)

    message = "a file system does not answer, and a process waits for it in the kernel"
    told = "a file system does not answer, and a process waits for it in the kernel"
    fix = (
        "on {node}: ps -eo pid,stat,wchan:32,comm | awk '$2 ~ /^D/' lists the waiting processes; tell the admin the "
        "mount and the time"
    )
    exit_code = Exit.SETUP
    also = ("AR605", "AR005")
    signs = (
        Sign(
            r"INFO: task (?P<command>.{1,40}):(?P<pid>[0-9]+) blocked for more than (?P<seconds>[0-9]+) seconds",
            confidence=Confidence.LIKELY,
        ),
        # slurmstepd: SIGKILL did not end them, so they wait in the kernel.
        Sign(
            r"STEPD TERMINATED ON (?P<node>[A-Za-z0-9_.-]+) AT .{1,40} DUE TO JOB NOT ENDING WITH SIGNALS",
            blames=Blames.NAMED,
            confidence=Confidence.LIKELY,
        ),
        Sign(r"nfs: server (?P<thing>[^ ]{1,200}) not responding"),
        Sign(r"nfs: server (?P<thing>[^ ]{1,200}) OK", Role.CONTEXT),
        Sign(r"Connection to (?P<thing>[^ ]{1,120}) \(at (?P<server>[^ )]{1,80})\) was lost; in progress operations"),
        Sign(
            r"Connection to service (?P<thing>[^ ]{1,120}) via nid (?P<server>[^ ]{1,80}) was lost; in progress "
            r"operations"
        ),
        Sign(r"This client was evicted by (?P<thing>[^ ;]{1,120}); in progress operations"),
        # Lost servers and connections; rc = -28 is a full target (AR005).
        Sign(
            r"LustreError: .{1,300}(?:rc =|rc|with) -(?:5|11|19|107|108|110|113)\b",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        # Newer kernels name the cluster and the client first.
        Sign(r"\bceph: (?:\[[^\]]{1,80}\]: )?mds[0-9]+ (?:hung|caps stale|reconnect start)", Role.LIKELY),
        Sign(r"Lost membership in cluster", Role.LIKELY),
        Sign(r"rpc_wait_bit_killable", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"\[Errno 107\] Transport endpoint is not connected: b?'(?P<thing>[^']{1,300})'"),
        Sign(
            r"\[Errno 5\] Input/output error(?:: b?'(?P<thing>[^']{1,300})')?",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"(?:read|write)\(\): fd [0-9]+ failed with Input/output error", Role.LIKELY, confidence=Confidence.LIKELY
        ),  # torch/csrc/serialization.cpp
        # ps aux: USER PID %CPU %MEM VSZ RSS TTY STAT START TIME COMMAND. Two signs: each needs a literal that is rare.
        Sign(_PS_LINE + r" python", confidence=Confidence.LIKELY),
        Sign(_PS_LINE + r" [^ ]{0,200}/bin/python", confidence=Confidence.LIKELY),
        *(Sign(_PS_WAITS + place, confidence=Confidence.LIKELY) for place in _PLACES),
        Sign(r"Failed to suspend process", Role.LIKELY, Blames.NOBODY, Confidence.UNDECIDED),
        Sign(
            r"\[Errno (?:108|112|121)\] [A-Z][A-Za-z/ ]{5,60}(?:: b?'(?P<thing>[^']{1,300})')?",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"\[Errno 30\] Read-only file system(?:: b?'(?P<thing>[^']{1,300})')?",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
    )
    hits = (
        "OSError: [Errno 30] Read-only file system: '/scratch/ckpt'",
        "OSError: [Errno 121] Remote I/O error: '/lustre/x'",
        "OSError: [Errno 108] Cannot send after transport endpoint shutdown",
        "OSError: [Errno 112] Host is down: '/mnt/share/x'",
        "error: *** STEP 63532.0 STEPD TERMINATED ON cn106 AT 2020-12-14T09:44:56 DUE TO JOB NOT ENDING WITH "
        "SIGNALS ***",
        " 1533  DNl  nfs_start_io_read      1-22:05:51     ray::PolicyWorker.save_checkpoint",
        *(f" 1533  D  {place}      1-22:05:51     python" for place in _PLACES),
        "[680111.646286] INFO: task python:280058 blocked for more than 120 seconds.",
        "[  207.955868] nfs: server 10.100.0.60 not responding, still trying",
        "nfs: server store01 not responding, timed out",
        "[  211.001023] nfs: server 10.100.0.60 OK",
        "Lustre: fs-OST0000-osc-ffff8: Connection to fs-OST0000 (at 10.0.1.5@tcp) was lost; in progress operations "
        "using "
        "this service will wait for recovery to complete",
        "Lustre: fs-OST0000-osc: Connection to service fs-OST0000 via nid 10.0.1.5@tcp was lost; in progress "
        "operations "
        "using this service will wait for recovery to complete.",
        "LustreError: 167-0: fs-MDT0001-mdc: This client was evicted by fs-MDT0001; in progress operations using this "
        "service will fail.",
        "LustreError: 11-0: fs-OST0002-osc-ffff8: operation ost_read to node 10.0.1.5@tcp failed: rc = -107",
        "kernel: ceph: mds0 hung",
        "kernel: ceph: [5a1e6c1c-7f0e-4c0b-9d57-0c4a8b6f2d11 4242]: mds0 caps stale",
        "mmfs: [E] Lost membership in cluster gpfs.site. Unmounting file systems.",
        "[<0>] rpc_wait_bit_killable+0x1e/0xb0 [sunrpc]",
        "OSError: [Errno 107] Transport endpoint is not connected: '/gpfs/run/ckpt'",
        "OSError: [Errno 5] Input/output error: '/lustre/data/shard-001.tar'",
        "RuntimeError: write(): fd 29 failed with Input/output error",
        "ERROR: filesystem_async: Local process 0 encountered an error: [Errno 5] Input/output error",
        "user001   280058  117  4.6 17517200480 24494736 ? Dl  00:36 291:14 python",
        "root      31337  0.0  0.1 1234567 24736 pts/0 D+  Dec01 1:14 /opt/venv/bin/python train.py",
        "Error: Failed to suspend process",
    )
    misses = (
        "user001   280059 87.9  4.4 17508566232 23526964 ? Rl  00:36 217:52 python",
        "user001   280059 87.9  4.4 17508566232 23526964 ? Ssl  Dec01 217:52 /opt/venv/bin/python train.py",
        "Lustre: Lustre: Build Version: 2.15.4",
        "LustreError: 11-0: scratch-OST0004-osc: operation ost_write to node 10.0.0.4 failed: rc = -28",
        "[c10d] The client socket failed: Transport endpoint is not connected",
    )


class DataloaderShm(Cause, id="AR607"):
    """Data loader workers ran out of shared memory.

    ## What it means
    Workers of torch.utils.data.DataLoader pass batches through `/dev/shm`, and it is full. Docker and Kubernetes give a
    container 64 MB by default.

    ## Why it breaks the job
    A worker that cannot get a page is killed by SIGBUS. The rank raises an exception, and the others wait for it. With
    many workers, large batches or pin_memory, it happens after minutes or in the second epoch.

    ## Example
    From torch 1.x in a container:

        ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).
        RuntimeError: DataLoader worker (pid 3867) is killed by signal: Bus error. It is possible that dataloader's workers are out of shared memory. Please try to raise your shared memory limit.

    ## Fix
    Provide more: `docker run --shm-size=16g` or `--ipc=host`; in Kubernetes an emptyDir with `medium: Memory` at
    /dev/shm; on a node `mount -o remount,size=50% /dev/shm`. Or use less: fewer workers, a smaller `prefetch_factor`.
    Dead jobs may have left files: `ls -l /dev/shm/torch_*`. "exited unexpectedly" without a bus error may have another
    reason: look for the out-of-memory killer in `dmesg`.

    ## Source
    PyTorch 2.13, torch/utils/data/dataloader.py, and the strings of its libraries (torch/csrc/DataLoader.cpp,
    aten/src/ATen/MapAllocator.cpp; read 2026-11-21). Older wording is from public logs.
    """  # noqa: E501  (a real line)

    message = "data loader workers ran out of shared memory"
    told = "data loader workers ran out of shared memory (/dev/shm)"
    fix = (
        "enlarge /dev/shm: docker run --shm-size=16g or --ipc=host; in Kubernetes an emptyDir with medium: Memory at "
        "/dev/shm"
    )
    exit_code = Exit.SETUP
    traits = frozenset({Trait.ENDS_RANKS})
    also = ("AR002", "AR008", "AR005")
    signs = (
        Sign(r"DataLoader worker \(pid (?P<pid>[0-9]+)\) is killed by signal: (?P<signal>Bus error)"),
        Sign(r"might be caused by insufficient shared memory \(shm\)"),
        Sign(r"possible that dataloader's workers are out of shared memory"),
        Sign(r"unable to (?:write to|resize|stretch) file </?torch_[0-9]"),
        Sign(r"unable to mmap [0-9]+ bytes from file </?torch_[0-9]"),
        # Without a reason (torch before 1.9), or with one; "Too many open files" is AR004's.
        Sign(
            r"unable to open shared memory object </?torch_[0-9_]{1,60}> in read-(?:write|only) mode(?:$|\r|: [NCP])",
            Role.LIKELY,
            confidence=Confidence.LIKELY,
        ),
        Sign(
            r"DataLoader worker \(pid(?:\(s\))? (?P<pid>[0-9]+)[0-9, ]{0,80}\) exited unexpectedly",
            Role.LIKELY,
            confidence=Confidence.UNDECIDED,
        ),
        Sign(r"no response from torch_shm_manager", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Pin memory thread exited unexpectedly", Role.LIKELY, confidence=Confidence.UNDECIDED),
    )
    hits = (
        "RuntimeError: Pin memory thread exited unexpectedly",
        "RuntimeError: DataLoader worker (pid 3867) is killed by signal: Bus error. It is possible that dataloader's "
        "workers "
        "are out of shared memory. Please try to raise your shared memory limit.",
        "ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).",
        "RuntimeError: unable to write to file </torch_169035_1920244589_10>: No space left on device (28)",
        "RuntimeError: unable to mmap 1024 bytes from file </torch_23_1_0>: Cannot allocate memory (12)",
        "RuntimeError: unable to open shared memory object </torch_52868_1950128645> in read-write mode",
        "RuntimeError: DataLoader worker (pid(s) 1724, 1725) exited unexpectedly",
        "RuntimeError: DataLoader worker (pid 31) exited unexpectedly with exit code 1. Details are lost due to "
        "multiprocessing. Rerunning with num_workers=0 may give better error trace.",
        "RuntimeError: unable to open shared memory object </torch_9_1_2> in read-write mode: No such file or "
        "directory (2)",
        'RuntimeError: no response from torch_shm_manager at "/opt/venv/torch/bin/torch_shm_manager"',
    )
    misses = (
        "RuntimeError: DataLoader worker (pid 3867) is killed by signal: Killed.",
        "UserWarning: This DataLoader will create 16 worker processes in total. Our suggested max number of worker "
        "in current "
        "system is 8",
        "RuntimeError: unable to open shared memory object </torch_9_1_2> in read-write mode: Too many open files (24)",
        "NCCL INFO Channel 00 : 0[0] -> 1[1] via SHM/direct/direct",
    )
    no_fault_yet = "the lab fills /dev/shm of a node for AR002; its script has no data loader"

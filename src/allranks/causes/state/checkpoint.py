"""Can the checkpoint be read, and by this number of ranks?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence


class CheckpointCorrupt(Cause, id="AR601"):
    """A checkpoint or weights file is incomplete or damaged.

    ## What it means
    The file exists but cannot be read to its end. The writer was killed, the disk or quota was full, a copy or download
    stopped, or the file is a Git LFS pointer.

    ## Why it breaks the job
    The job cannot resume, and every restart fails at the same place. If only some ranks read the damaged part, they
    fail with an exception, and the others wait for them.

    ## Example
    From open-mmlab/mmdetection#4835 (torch 1.6), and from torch 2.0:

        RuntimeError: [enforce fail at inline_container.cc:144] . PytorchStreamReader failed reading zip archive: failed finding central directory
        RuntimeError: PytorchStreamReader failed reading file data/8: invalid header or archive is corrupted

    ## Fix
    Resume from the previous checkpoint, and move the damaged one away so that no restart picks it. Test a file:

        python -c "import torch, sys; torch.load(sys.argv[1], map_location='cpu', weights_only=True)" FILE

    `allranks check --checkpoints DIR` tests whether a directory can hold checkpoints. Write to a temporary name and
    rename the complete file, from one rank or with torch.distributed.checkpoint. Check `df` and the quota. A file of a
    few hundred bytes is a pointer: `git lfs pull`.

    ## Source
    PyTorch, caffe2/serialize/inline_container.cc and third_party/miniz (the zip's words; "high likelihood" since
    pytorch/pytorch#170244), torch/serialization.py and libtorch's strings, 2.13 and older. safetensors, several versions,
    bindings/python/src/lib.rs. All read 2026-11-21.
    """  # noqa: E501  (a real line)

    message = "a checkpoint is incomplete or damaged"
    told = "a checkpoint or weights file is incomplete or damaged"
    fix = "resume from the previous checkpoint, and move the damaged one away; check df and the quota"
    exit_code = Exit.SETUP
    traits = frozenset({Trait.OF_ONE_CALL})
    also = ("AR005",)
    signs = (
        Sign(r"PytorchStreamReader failed reading (?P<part>zip archive|file [^ :]{1,200})"),
        Sign(r"PytorchStreamReader failed (?:locating|closing|checking|getting)", Role.LIKELY),
        Sign(r"invalid header or archive is corrupted"),
        Sign(r"failed finding central directory"),
        Sign(r"high likelihood that your checkpoint file is corrupted"),
        Sign(r"unexpected EOF, expected (?P<missing>[0-9]+) more bytes\. The file might be corrupted"),
        Sign(r"storage has wrong size: expected -?[0-9]+ got [0-9]+"),
        Sign(r"Invalid magic number; corrupt file\?"),
        Sign(r"UnpicklingError: pickle data was truncated"),
        Sign(r"UnpicklingError: invalid load key", Role.LIKELY),  # of a file, or of what other ranks sent
        Sign(r"EOFError: Ran out of input", Role.LIKELY, confidence=Confidence.LIKELY),
        Sign(r"Error while deserializing header: "),
        Sign(r"BadZipFile: (?:File is not a zip file|Bad CRC-32)", Role.LIKELY),
        Sign(r"Unable to (?:synchronously )?open file \(truncated file"),
        Sign(r"No such file or directory: '(?P<thing>[^']{1,300}/\.metadata)'", Role.LIKELY),
        # Our own: the first ends the job, the second is told by one that went on from an older checkpoint.
        Sign(r"none of the (?P<present>[0-9]+) checkpoints in (?P<thing>[^ ]{1,300}) is whole, the newest: "),
        Sign(r"checkpoint (?P<thing>/[^ ]{1,300}) is passed over: ", Role.CONTEXT, Blames.NAMED),
        Sign(r"Data loss: (?:Unable to open table file|not an sstable|file is too short)"),
        Sign(r"Client provided checkpoint load paths?: .{1,400} does not exist", Role.LIKELY),
        # Which one it was, as the line before tells: MMEngine, Megatron, DeepSpeed, Lightning.
        Sign(
            r"(?:[Ll]oad(?:ing)?|Restoring) (?:[a-z]{1,12} )?(?:checkpoint|states) from (?:the checkpoint path at "
            r"|local path: ?|checkpoint )?(?P<thing>[\w.~-]{0,200}/[\w./-]{1,300}\w)",
            Role.CONTEXT,
            Blames.NOBODY,
        ),
    )
    hits = (
        "RuntimeError: [enforce fail at inline_container.cc:144] . PytorchStreamReader failed reading zip archive: "
        "failed "
        "finding central directory",
        "RuntimeError: PytorchStreamReader failed reading file data/8: invalid header or archive is corrupted",
        "RuntimeError: PytorchStreamReader failed locating file data/1042: file not found",
        "RuntimeError: PytorchStreamReader failed reading file .format_version: invalid header or archive is "
        "corrupted. This "
        "is an internal miniz error. If you are seeing this error, there is a high likelihood that your checkpoint "
        "file is "
        "corrupted. This can happen if the checkpoint was not saved properly, was transferred incorrectly, or the "
        "file was "
        "modified after saving.",
        "RuntimeError: unexpected EOF, expected 4456435 more bytes. The file might be corrupted.",
        "RuntimeError: storage has wrong size: expected 0 got 512",
        "RuntimeError: storage has wrong size: expected -4669315570785868528 got 512",
        "RuntimeError: Invalid magic number; corrupt file?",
        "_pickle.UnpicklingError: pickle data was truncated",
        "_pickle.UnpicklingError: invalid load key, '\\x00'.",
        "[rank3]: EOFError: Ran out of input",
        "safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer",
        "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully "
        "covered",
        "zipfile.BadZipFile: File is not a zip file",
        "OSError: Unable to open file (truncated file: eof = 96, sblock->base_addr = 0, stored_eof = 2048)",
        "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/step-1000/.metadata'",
        "allranks.state.saved.checkpoint.CheckpointError: none of the 2 checkpoints in /scratch/ckpt is whole, the "
        "newest: rank 1 reads rank_00001.safetensors: block 3 of 96 does not match its checksum; move them away to "
        "begin anew",
        "allranks: checkpoint /scratch/ckpt/step_300 is passed over: rank 0 reads MANIFEST.json: is not there; going "
        "on from step_200",
        "tensorflow.python.framework.errors_impl.DataLossError: Data loss: not an sstable (bad magic number)",
        "load checkpoint from local path: work_dirs/basicvsr/iter_90000.pth",
        "Restoring states from the checkpoint path at /ckpt/last.ckpt",
        "[WARNING] Client provided checkpoint load path: /ckpt/mp_rank_00_model_states.pt does not exist ... skip "
        "checkpoint load",
    )
    misses = (
        "RuntimeError: Error(s) in loading state_dict for GPT: size mismatch for head.weight",
        "Loading checkpoint shards: 100%|##########| 4/4 [00:11<00:00,  2.81s/it]",
        "FileNotFoundError: [Errno 2] No such file or directory: 'data/train.json'",
        "ValueError: dataset is corrupted: 3 empty documents",
        "allranks: the checkpoint of step 3 is not written: Read-only file system (/scratch/ckpt); training goes on, "
        "the newest is step 2",
    )


class WorldSizeChanged(Cause, id="AR603"):
    """The checkpoint was written by another number of ranks.

    ## What it means
    A job of another size wrote the checkpoint: it has one optimizer shard per rank of that job, or tensors that were
    split for another tensor or pipeline parallelism. Or the batch size is not divisible by the new number of ranks.

    ## Why it breaks the job
    Each rank reads the shard of its own number. With fewer or more ranks, shards are missing or unused. Frameworks
    reject such a checkpoint, or fail later with tensors of unequal sizes.

    ## Example
    From THUDM/GLM#136, DeepSpeed:

        deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 256 but the current world size is 2. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size is not currently supported.

    ## Fix
    Run with the old number of ranks, or convert the checkpoint: DeepSpeed's universal checkpoint (`ds_to_universal.py
    --input_folder IN --output_folder OUT`, `"load_universal": true`), Megatron's `--ckpt-format torch_dist`, or
    `torch.distributed.checkpoint`, which reshards. If you need only the weights, load without the optimizer. An elastic
    restart with fewer nodes needs one of these from the start.

    ## Source
    DeepSpeed, deepspeed/runtime/engine.py, runtime/state_dict_factory.py, runtime/config.py, elasticity/elasticity.py,
    several versions. PyTorch, torch/distributed/_shard/sharded_tensor/api.py, 2.13 and older. Megatron-LM,
    megatron/training/checkpointing.py. All read 2026-11-21.
    """  # noqa: E501  (a real line)

    message = "the checkpoint was written by another number of ranks"
    told = "the checkpoint was written by another number of ranks than this job has"
    fix = (
        "run with the number of ranks that wrote it, or convert it (universal checkpoint, torch.distributed.checkpoint)"
    )
    exit_code = Exit.USAGE
    signs = (
        Sign(
            r"used a DP world size of (?P<wanted>[0-9]+) but the current world size is (?P<present>[0-9]+)",
            blames=Blames.NOBODY,
        ),
        Sign(
            r"checkpoint data for (?P<wanted>[0-9]+) ranks, but the current world size is (?P<present>[0-9]+)",
            blames=Blames.NOBODY,
        ),
        Sign(r"(?:Local|Global) world size at save time was (?P<wanted>[0-9]+)", blames=Blames.NOBODY),
        Sign(r"(?:Local|Global) rank at save time was (?P<saved_rank>[0-9]+), but at", blames=Blames.NOBODY),
        Sign(r"Invalid checkpoints? and world size for sd (?:merge|split)", blames=Blames.NOBODY),
        Sign(r"is not valid with the current list of valid GPU counts", blames=Blames.NOBODY),
        Sign(
            r"train_batch_size is not equal to micro_batch_per_gpu \* gradient_acc_step \* world_size",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.UNDECIDED,
        ),
        Sign(
            r"(?:tensor_model|pipeline_model|context|expert_model)_parallel_size value from checkpoint",
            blames=Blames.NOBODY,
        ),
        Sign(
            r"Missing key in checkpoint state_dict: .{0,200}\bdp_rank_(?P<rank>[0-9]+)\b",
            Role.LIKELY,
            Blames.NAMED,
            Confidence.LIKELY,
        ),
        Sign(r"mismatch after resume \(.{1,120} from checkpoint\)", Role.LIKELY, Blames.NOBODY, Confidence.LIKELY),
        Sign(
            r"The size of tensor a \([0-9]{7,}\) must match the size of tensor b \([0-9]{7,}\) at non-singleton "
            r"dimension 0",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        # FSDP and FairScale cut all parameters as one, each rank its share: of equal models only the shares differ.
        Sign(
            r"size mismatch for (?:[\w.]{1,200}\.)?_?flat_param(?:_[0-9]+)?: ",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        Sign(
            r"checkpoint was saved with world_size(?:=| )(?P<wanted>[0-9]+)",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
    )
    hits = (
        "RuntimeError: Missing key in checkpoint state_dict: dataloader.dp_rank_15.",
        "deepspeed.runtime.zero.utils.ZeRORuntimeException: The checkpoint being loaded used a DP world size of 256 "
        "but the "
        "current world size is 2. Automatic adjustment of ZeRO's optimizer state partitioning with a new world size "
        "is not "
        "currently supported.",
        "ValueError: Inconsistent distributed training configuration: the loaded state_dict contains checkpoint data "
        "for 2 "
        "ranks, but the current world size is 4.",
        "RuntimeError: Local world size at save time was 8, but at load time was 4",
        "RuntimeError: Global rank at save time was 3, but at load time was 1",
        "AssertionError: Invalid checkpoints and world size for sd merge",
        "deepspeed.elasticity.config.ElasticityIncompatibleWorldSize: World size (6) is not valid with the current "
        "list of "
        "valid GPU counts: [1, 2, 4, 8]",
        "AssertionError: Check batch related parameters. train_batch_size is not equal to micro_batch_per_gpu * "
        "gradient_acc_step * world_size 16 != 4 * 1 * 8",
        "AssertionError: tensor_model_parallel_size value from checkpoint (8) is not equal to the input argument "
        "value (4).",
        "(TP, PP) mismatch after resume ((4, 2) vs (8, 1) from checkpoint): RNG state will be ignored",
        "RuntimeError: The size of tensor a (56124554) must match the size of tensor b (14031139) at non-singleton "
        "dimension 0",
        "\tsize mismatch for flat_param_0: copying a param with shape torch.Size([12584960]) from checkpoint, the "
        "shape in current model is torch.Size([3146240]).",
        "\tsize mismatch for model._fsdp_wrapped_module._flat_param: copying a param with shape torch.Size([8])",
        "RuntimeError: checkpoint was saved with world_size=8, but this run has world_size=4",
    )
    misses = (
        "RuntimeError: The size of tensor a (512) must match the size of tensor b (77) at non-singleton dimension 1",
        "ncclCommInitRank comm 0x5 rank 0 nranks 8: the current world size is 8",
        "Setting up process group for: env:// [rank=0, world_size=8]",
    )
    no_fault_yet = "the lab's script keeps no sharded state"

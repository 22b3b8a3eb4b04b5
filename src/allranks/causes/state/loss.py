"""Did loss and gradients stay finite?"""

from __future__ import annotations

from allranks.causes.cause import Cause
from allranks.causes.sign import Blames, Role, Sign
from allranks.causes.trait import Trait
from allranks.model.errors import Exit
from allranks.model.finding import Confidence

_NAN_LINES = (
    r"(?i:loss: nan\b)",
    r"(?i:loss:nan\b)",
    r"(?i:loss=nan\b)",
    r"(?i:loss = nan\b)",
    r"(?i:loss nan\b)",
    r"(?i:loss': nan\b)",
    r"(?i:loss\": nan\b)",
    r"(?i:loss is nan\b)",
    r"(?i:loss is not finite)",
    r"(?i:non-finite loss)",
    r"(?i:for nan or inf in\b)",
    r"(?i:grad[_ ]norm: nan\b)",
    r"(?i:grad[_ ]norm=nan\b)",
    r"(?i:grad_norm': nan\b)",
    r"(?i:grad_norm\": nan\b)",
    r"(?i:\bloss) {1,8}nan \(  {0,8}nan\)",
    r"tensor\(nan\b",
)
"""How a progress line shows it; each spacing is a pattern of its own, so that each has its literal."""


class NanLoss(Cause, id="AR604"):
    """The loss or the gradients became NaN or infinite.

    ## What it means
    A number overflowed or was invalid, and every value computed from it is NaN. Most of the time the reason is data,
    learning rate or precision; sometimes it is a faulty GPU.

    ## Why it breaks the job
    Frameworks stop on purpose, because further steps would train noise. The first rank to detect it raises an
    exception; the others wait for it or are ended. A single skipped step of fp16 training ("reducing loss scale") is
    not a failure.

    ## Example
    From Megatron-LM (70B on 4 nodes) and from DeepSpeed:

        AssertionError: Rank 11: found NaN in local grad norm in backward pass before data-parallel communication collective. Device: 3
        Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.

    ## Fix
    Go back to an earlier checkpoint and skip the batch, lower the learning rate, clip gradients, or use bf16 instead of
    fp16. To find the operation, use `torch.autograd.set_detect_anomaly(True)` for some steps, or Megatron's
    `--rerun-mode validate_results`, which computes the step twice. If it is always the same rank or GPU, with other
    data too, exclude its node and test it (`dcgmi diag -r 3`).

    ## Source
    Megatron-LM, megatron/core/distributed/param_and_grad_buffer.py, megatron/core/rerun_state_machine.py. DeepSpeed,
    runtime/fp16/loss_scaler.py. Lightning, utilities/finite_checks.py, callbacks/early_stopping.py. fairseq,
    optim/dynamic_loss_scaler.py. PyTorch, torch/csrc/autograd/engine.cpp, torch/nn/utils/clip_grad.py; torchvision's
    references. All read 2026-11-21.
    """  # noqa: E501  (a real line)

    message = "the loss or the gradients became NaN or infinite"
    told = "the loss or the gradients became NaN or infinite"
    fix = (
        "go back to an earlier checkpoint; skip the batch or lower the learning rate; if it is always one GPU: dcgmi "
        "diag -r 3"
    )
    exit_code = Exit.USER_CODE
    traits = frozenset({Trait.JOB_MAY_GO_ON, Trait.OF_ONE_CALL})
    signs = (
        Sign(r"Rank (?P<rank>[0-9]+): found (?:NaN|Inf|unexpectedly large grads) in local", blames=Blames.NAMED),
        Sign(
            r"Rank (?P<rank>[0-9]+), node (?P<node>[^ ,]{1,100}), device (?P<gpu>[0-9]+), iteration [0-9-]+: "
            r"Unexpected "
            r"result (?:nan|inf)",
            blames=Blames.NAMED,
        ),
        Sign(r"found (?:NaN|Inf) in local (?:grad norm|forward loss)"),
        Sign(r"number of nan iterations:   [1-9] ", Role.LIKELY, Blames.NOBODY),
        Sign(r"Current loss scale already at minimum - cannot decrease scale"),
        Sign(r"Minimum loss scale reached \("),
        Sign(r"Loss is (?:nan|inf|-inf), stopping training"),
        Sign(r"NaN loss during training"),
        Sign(r"(?i:(?:nan|inf) grad norm occurs)", Role.LIKELY, Blames.NOBODY),  # InternEvo
        Sign(r"(?i:loss bec[ao]me infinite or nan)"),
        Sign(r"The loss returned in `training_step` is (?:nan|inf|tensor\((?:nan|inf))"),
        Sign(r"Detected nan and/or inf values in `(?P<thing>[^`]{1,200})`"),
        Sign(r"Monitored metric .{1,80} is not finite"),
        Sign(r"Function '(?P<thing>[A-Za-z0-9_]{1,80})' returned nan values in its [0-9]+th output"),
        Sign(r"The total norm of order .{1,20} for gradients from `parameters` is non-finite"),
        Sign(r"probability tensor contains either `inf`, `nan` or element < 0", Role.LIKELY),
        Sign(r"reducing loss scale to (?:0\.0\b|[0-9.]+e-[0-9])", Role.LIKELY, confidence=Confidence.LIKELY),
        *(Sign(pattern, Role.LIKELY, Blames.NOBODY, Confidence.LIKELY) for pattern in _NAN_LINES),
        # TensorBoard's word for what it is to draw.
        Sign(r"(?i:nan or inf found in input tensor)", Role.LIKELY, Blames.NOBODY, Confidence.UNDECIDED),
        Sign(r"[Gg]radient overflow\. {1,2}Skipping step", Role.CONTEXT, Blames.NOBODY),
        # Halved down to nothing: no scale helps any more.
        Sign(
            r"Attempted loss scale: (?:1|1\.0|0\.[0-9]+), reducing to (?:1|1\.0|0\.[0-9]+)\b",
            Role.LIKELY,
            Blames.NOBODY,
            Confidence.LIKELY,
        ),
        Sign(r"Skipping step\. Attempted loss scale", Role.CONTEXT, Blames.NOBODY),
    )
    hits = (
        "AssertionError: Rank 11: found NaN in local grad norm in backward pass before data-parallel communication "
        "collective. Device: 3, node: node-15-11",
        "RuntimeError: Rank 55, node g21u01, device 7, iteration 1: Unexpected result nan (message='found NaN in "
        "local grad "
        "norm for bucket #0 in backward pass before data-parallel communication collective')",
        "ValueError: Rank 4: found NaN in local forward loss calculation. Device: 4, node: n3",
        " iteration 29060/ 311541 | lm loss: NAN | number of skipped iterations:   0 | number of nan iterations:   1 |",
        "[07/03 00:00:54.724]: Epoch: [12/40][1000/2052]  L_an   nan (  nan)  LR 9.522e-05  Loss   nan (  nan)  Mem 15",
        "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        "[deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 1, reducing to 1",
        "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding. Try lowering the "
        "learning "
        "rate, using gradient clipping or increasing the batch size.",
        "Loss is nan, stopping training",
        "WARNING hybrid_zero_optim.py:748 in _step -- Nan grad norm occurs, please check it.",
        "tensorflow.python.training.basic_session_run_hooks.NanLossDuringTrainingError: NaN loss during training.",
        "FloatingPointError: Loss became infinite or NaN at iteration=412!",
        "2021-09-14 08:12:55,103 - mmdet - INFO - loss become infinite or NaN!",
        "Skipping backward and optimizer step for nan or inf in forwarding metrics/loss!",
        "WARNING: Epoch 3: non-finite loss (nan); skipping this batch.",
        "RuntimeError: loss is not finite: tensor([inf])",
        "WARNING:root:NaN or Inf found in input tensor.",
        "ValueError: The loss returned in `training_step` is nan.",
        "ValueError: Detected nan and/or inf values in `layer.weight`. Check your forward pass for numerically "
        "unstable "
        "operations.",
        "Monitored metric train_loss = nan is not finite. Previous best value was 2.311. Signaling Trainer to stop.",
        "RuntimeError: Function 'MulBackward0' returned nan values in its 0th output.",
        "RuntimeError: The total norm of order 2.0 for gradients from `parameters` is non-finite, so it cannot be "
        "clipped.",
        "RuntimeError: probability tensor contains either `inf`, `nan` or element < 0",
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 0.0",
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
        "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
        "1/1 - 3s - loss: nan",
        "step 12 loss:nan",
        "Epoch 3:  12%|#2        | 31/250 [00:11<01:20, loss=nan]",
        "train_loss = nan",
        "epoch 3 step 100 loss nan lr 0.001",
        "{'loss': nan, 'grad_norm': nan, 'learning_rate': 2e-05, 'epoch': 0.1}",
        '{"loss": NaN, "grad_norm": NaN}',
        "grad_norm: nan",
        "grad_norm=nan",
        "tensor(nan, device='cuda:0', grad_fn=<NllLossBackward0>)",
    )
    misses = (
        " iteration 29060/ 311541 | lm loss: 8.7E+00 | number of skipped iterations:   0 | number of nan iterations: "
        "  0 |",
        "{'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 2e-05, 'epoch': 0.1}",
        "loss: nanmean over 8 ranks = 2.31",
        "[Rank 0] loss scale 65536",
    )
    no_fault_yet = "the lab tests faults of systems, not of numbers"

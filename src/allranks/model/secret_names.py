"""Which names say that their value is a secret? The one table; report/mask.py hides the values."""

from __future__ import annotations

import re

_SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|(?:^|[_.-])PASS$|[_.-]PWD$", re.I)
STRONG_NAME = re.compile(
    r"secret|passw|passphrase|credential"
    r"|(?<![a-z0-9])(?:api|access|private|account|storage|auth|signing|encryption|license|wandb|ssh|deploy)[._-]?keys?(?![a-z])"
    r"|(?<![a-z0-9])(?:auth|access|refresh|bearer|session|api|hf|hub|github|gitlab|wandb|id)[._-]?tokens?(?![a-z_-])",
    re.I,
)
"""Whatever stands there is hidden, also a word or a number."""
_HARMLESS_NAME = re.compile(
    r"tokeniz|keyword|keyerror|keyboard|keypoint|keyframe|monkey|key_padding|token_(?:id|type|ids|mask)"
    r"|(?:bos|eos|pad|unk|sep|cls|mask|image|img|special|placeholder|initializer|stop|trigger|text|audio|vision)[_-]?token",
    re.I,
)
"""What has such a word in it, and holds no secret."""


def is_secret_name(name: str) -> bool:
    """Whether a variable with this name has a value that must not be shown or written.

    >>> is_secret_name("HF_TOKEN"), is_secret_name("TOKENIZERS_PARALLELISM")
    (True, False)
    """
    last = name.rpartition(".")[2]
    return bool(STRONG_NAME.search(name) or (_SECRET_NAME.search(last) and not _HARMLESS_NAME.search(last)))

"""How are addresses and endpoints written in lines of logs? Pieces of patterns that several causes' signs share.

Sign(r"while trying to connect to " + ENDPOINT)      # (node01, 29500), 10.0.0.1:29500
Sign(r"[Cc]onnect to " + NCCL_PEER + r" failed : ")  # 10.0.0.1<45763>, node1<57557>
"""

from __future__ import annotations

IPV4 = r"(?:[0-9]{1,3}\.){3}[0-9]{1,3}"
IPV6 = r"[0-9a-fA-F]{0,4}:[0-9a-fA-F:.]{1,45}"
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,120}"
"""A host name; digits alone are one, too (`05`)."""
MASKED = r"<[A-Za-z0-9_. -]{1,40}>|[0-9*]{1,4}(?:\.[0-9*]{1,4}){1,3}|\*{2,40}"
"""What people put in place of a name or an address before they show a log; `xx.xx.xx.xx` and `IP1` are names."""
PORT = r"(?P<port>[0-9]+|<?[A-Za-z_*]{1,12}>?)"
"""A port, or what stands in its place."""
ANY_PORT = r"[0-9A-Za-z_*<>]{1,14}"

_ADDRESS_OR_NODE = rf"(?:(?P<address>{IPV4}|{IPV6})|(?P<node>{NAME}|{MASKED}))"

ENDPOINT = rf"\(?{_ADDRESS_OR_NODE}(?:, |:){PORT}"
"""`(node01, 29500)` as torch.distributed writes what it was told to connect to; older ones wrote `node01:29500`."""
TRIED = rf"\[?(?:::ffff:)?{_ADDRESS_OR_NODE}\]?:{PORT}"
"""`[::ffff:10.0.0.1]:29500`, `[node01]:29500`: one of the addresses that torch.distributed tried for it."""
NCCL_PEER = rf"(?P<peer>[0-9A-Za-z_.:%*-]{{1,120}}|{MASKED})<{PORT}>"
"""`10.0.0.1<45763>`, `node1<57557>`, `fe80::1%eth0<40123>`."""
GLOO_PEER = rf"\[(?P<peer>[0-9A-Za-z_.:%*-]{{1,120}}|{MASKED})\]:{PORT}"

FAR_PEER = (
    r"(?P<peer>(?:(?:[0-9]{1,2}|1[013-5][0-9]|12[0-689]|16[0-8]|17[013-9]|1[89][0-9]|2[0-9]{2})\.[0-9]{1,3}"
    r"|172\.(?:[02-9]|1[0-689]|[2-9][0-9]|[12][0-9]{2}))\.[0-9]{1,3}\.[0-9]{1,3}"
    r"|(?:2|f[cd])[0-9a-f]{1,3}:[0-9a-f:]{1,40}|[A-Za-z_][0-9A-Za-z_.-]{1,120}"
    r"|<[A-Za-z0-9_. -]{1,40}>|(?:[0-9]{1,3}\.){0,3}[*xX]{1,3}(?:\.[0-9*xX]{1,3}){0,3})"
)
"""A peer whose address may well be another machine's: none of 127, 169.254, 172.17 and fe80."""
OF_ONE_MACHINE = (
    r"(?P<address>172\.17\.0\.1|192\.168\.122\.1|169\.254\.[0-9]{1,3}\.[0-9]{1,3}"
    r"|fe80:[0-9a-f:]{2,40}(?:%[A-Za-z0-9_.-]{1,15})?)"
)
"""Addresses that no other machine reaches: docker0's and libvirt's by default, and link-local ones."""
OF_A_CONTAINER = r"(?P<address>172\.17\.[0-9]{1,3}\.[0-9]{1,3})"
"""Docker's own subnet: within one container all is well with it."""
NOT_REACHED = (
    r"(?P<error>No route to host|Connection refused|Connection timed out|Network is unreachable|Invalid argument"
    r"|Cannot assign requested address|Software caused connection abort)"
)
NIC_OF_ONE_MACHINE = (
    r"(?P<interface>docker[0-9]+|veth[0-9A-Za-z]{3,12}|virbr[0-9]+|br-[0-9a-f]{12}|podman[0-9]+|cni[0-9]+|lxcbr[0-9]+)"
)

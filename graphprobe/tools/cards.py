"""Memory bandwidth of NVIDIA cards by their datasheets, in bytes per second, by the name that the driver gives them."""

from __future__ import annotations

import re

from graphprobe.errors import ConfigError

PARTIAL = re.compile(r"\bMIG\b|laptop|mobile|notebook", re.IGNORECASE)
"""A slice has a part of the bandwidth, and a laptop's card less than the desktop's whose name it has."""

# NVIDIA's datasheets of the data-center cards, read on their product pages; where a datasheet rounds, so does this.
SERVER = (
    (r"G?B300\b", 8.0e12),  # Blackwell Ultra datasheet
    (r"G?B200\b", 8.0e12),  # DGX B200 and GB200 datasheets: 64 TB/s of 8 GPUs; HGX B200 reaches 7.7
    (r"GH200 144G", 4.9e12),  # GH200 datasheet, HBM3e
    (r"GH200\b", 4.0e12),  # the same, 96 GB of HBM3
    (r"H200\b", 4.8e12),  # H200 datasheet, SXM and NVL
    (r"H100 NVL\b", 3.9e12),  # H100 datasheet
    (r"H100 PCIe\b", 2.0e12),  # H100 PCIe product brief
    (r"H[18]00( SXM5?)?( 80GB HBM3)?$", 3.35e12),  # H100 datasheet, SXM
    (r"H20$", 4.0e12),  # H20 as its sellers list it, HBM3
    (r"A[18]00-(SXM4|PCIE)-40GB", 1.555e12),  # A100 datasheet
    (r"A[18]00-SXM4?-80GB", 2.039e12),  # the same
    (r"A[18]00[ -](PCIE-)?80GB( PCIe)?", 1.935e12),  # the same
    (r"A30\b", 933e9),  # A30 datasheet
    (r"A40\b", 696e9),  # A40 datasheet
    (r"A10G?\b", 600e9),  # A10 datasheet
    (r"A16\b", 200e9),  # A16 datasheet, each of its four GPUs
    (r"A2\b", 200e9),  # A2 datasheet
    (r"L40S?\b", 864e9),  # L40 and L40S datasheets
    (r"L4\b", 300e9),  # L4 datasheet
    (r"T4G?\b", 320e9),  # T4 datasheet ("320+ GB/s")
    (r"V100S", 1.134e12),  # V100 datasheet
    (r"V100-(SXM2|PCIE)", 900e9),  # the same; SXM3 and FHHL have other memory
    (r"P100-(SXM2|PCIE)-16GB", 732e9),  # P100 datasheet
    (r"GB10\b", 273e9),  # DGX Spark datasheet
)

# NVIDIA's datasheets of the RTX line for workstations.
WORKSTATION = (
    (r"RTX PRO 6000 Blackwell Server", 1.597e12),  # RTX PRO 6000 server edition datasheet
    (r"RTX PRO 6000 Blackwell", 1.792e12),  # RTX PRO 6000 workstation edition datasheet
    (r"RTX 6000 Ada", 960e9),
    (r"RTX 5000 Ada", 576e9),
    (r"RTX A6000\b", 768e9),
    (r"RTX A5000\b", 768e9),
    (r"RTX A4000\b", 448e9),
)

# Bus width x data rate of NVIDIA's specification of each card. Left out: names that two of them share (RTX 3080 with
# 760 and 912 GB/s, RTX 4070 with 504 and 480).
GEFORCE = (
    (r"RTX 5090( D)?$", 1.792e12),
    (r"RTX 5080$", 960e9),
    (r"RTX 5070 Ti$", 896e9),
    (r"RTX 5070$", 672e9),
    (r"RTX 5060( Ti)?$", 448e9),
    (r"RTX 4090( D)?$", 1.008e12),
    (r"RTX 4080 SUPER$", 736e9),
    (r"RTX 4080$", 716.8e9),
    (r"RTX 4070 Ti SUPER$", 672e9),
    (r"RTX 4070( Ti| SUPER)$", 504e9),
    (r"RTX 4060 Ti$", 288e9),
    (r"RTX 4060$", 272e9),
    (r"RTX 3090 Ti$", 1.008e12),
    (r"RTX 3090$", 936e9),
    (r"RTX 3080 Ti$", 912e9),
    (r"RTX 3070 Ti$", 608e9),
    (r"RTX 3070$", 448e9),
    (r"RTX 2080 Ti$", 616e9),
)

MAKER = r"^(?:NVIDIA |Tesla |GeForce |Graphics Device )*"
CARDS = tuple((re.compile(MAKER + name, re.IGNORECASE), rate) for name, rate in SERVER + WORKSTATION + GEFORCE)
"""A pattern of the name, and bytes per second; the first that fits decides."""


def datasheet(device: str) -> float | None:
    """Bytes per second of the memory of ``device``, a name as ``torch.cuda.get_device_name`` gives it.

    None where no datasheet is known, and for laptops and slices of a card. ConfigError where ``device`` is no text.
    """
    if not isinstance(device, str):
        raise ConfigError(f"a device is named by text, got {device!r}", "torch.cuda.get_device_name()")
    if PARTIAL.search(device):
        return None
    return next((rate for name, rate in CARDS if name.match(device.strip())), None)

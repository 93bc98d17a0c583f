"""Generated colour images of ten textures: enough for a small network to learn something in seconds.

Five patterns (horizontal, vertical and diagonal stripes, checks, rings), each coarse and fine. Mirrored or shifted they stay
what they are, so the usual augmentation does not change a class. Phase, place, colours and contrast are drawn for each image,
and noise lies over all, so no single pixel tells the class.
"""

import math

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

CLASSES = 10
SIDE = 32
#: Cycles over the width of an image, of the coarse and of the fine patterns, and by which share a single image may deviate.
CYCLES = (3.0, 6.0)
JITTER = 0.15
#: Of the wave, as a share of the range of brightness; and the standard deviation of the noise over it.
CONTRAST = (0.15, 0.45)
NOISE = 0.12


def generate(count: int, *, seed: int = 0) -> tuple[UInt8[Tensor, "images 3 32 32"], Int[Tensor, " images"]]:
    """Images and their labels in random order, each class equally often (to within one); the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Float[Tensor, "..."]:
        return torch.rand(count, *shape, generator=generator) * (high - low) + low

    labels = (torch.arange(count) % CLASSES)[torch.randperm(count, generator=generator)]
    cycles = torch.tensor(CYCLES)[labels // 5] * uniform(low=1 - JITTER, high=1 + JITTER)
    frequency = (2 * math.pi / SIDE * cycles)[:, None, None]
    across, down = (uniform(1, 1, low=-math.pi, high=math.pi) for _ in range(2))
    middle_x, middle_y = (uniform(1, 1, low=-SIDE / 4, high=SIDE / 4) for _ in range(2))
    slope = torch.where(uniform(1, 1) < 0.5, -1.0, 1.0)
    pixels = torch.arange(SIDE) - (SIDE - 1) / 2
    x, y = pixels[None, None, :], pixels[None, :, None]
    stripes_x, stripes_y = torch.sin(frequency * x + across), torch.sin(frequency * y + down)
    patterns = (
        stripes_y.expand(count, SIDE, SIDE),
        stripes_x.expand(count, SIDE, SIDE),
        torch.sin(frequency * (x + slope * y) / math.sqrt(2) + across),
        stripes_x * stripes_y,
        torch.sin(frequency * torch.hypot(x - middle_x, y - middle_y) + across),
    )
    wave = torch.stack(patterns)[labels % 5, torch.arange(count)]
    # Each channel has its own share of the wave, of either sign, over its own ground.
    share = uniform(3, 1, 1, low=-1, high=1)
    share = share / share.abs().amax(1, keepdim=True) * uniform(1, 1, 1, low=CONTRAST[0], high=CONTRAST[1])
    ground = uniform(3, 1, 1, low=0.3, high=0.7)
    noise = NOISE * torch.randn(count, 3, SIDE, SIDE, generator=generator)
    images = ground + share * wave[:, None] + noise
    return (images.clamp(0, 1) * 255).round().to(torch.uint8), labels

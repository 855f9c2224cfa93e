"""Turn any picture that Pillow opens into upright RGB, as a viewer shows it on a white page."""

from __future__ import annotations

import numpy as np
from PIL import Image, ImageOps

_WHITES = (255, 1023, 4095, 16383, 65535)  # of 8, 10, 12, 14 and 16 bits


def as_rgb(picture: Image.Image) -> Image.Image:
    """Return an upright RGB image. ``picture`` is one image of its own, and may be changed.

    What is transparent shows white. Pixels that are no bytes (16 or 32 bits, floats) are scaled: 0 is black, and white
    is 65535 in PNG; in other formats 1 for floats up to 1, else the largest value of the fewest bits that hold all
    pixels (8, 10, 12, 14 or 16), or the brightest pixel above that.

    Raises:
        ValueError: such pixels are negative or not finite.
    """
    ImageOps.exif_transpose(picture, in_place=True)
    if picture.mode.startswith(("I", "F")):
        picture = _scaled(np.asarray(picture), is_png=picture.format == "PNG")
    if picture.has_transparency_data:
        colors = picture.convert("RGBA")
        picture = Image.alpha_composite(Image.new("RGBA", colors.size, "white"), colors)
    return picture if picture.mode == "RGB" else picture.convert("RGB")  # which would copy


def _scaled(pixels: np.ndarray, *, is_png: bool) -> Image.Image:
    least, most = float(pixels.min(initial=0)), float(pixels.max(initial=0))
    if not (least >= 0 and most < np.inf):
        raise ValueError(f"its pixels are from {least:g} to {most:g}; expected numbers from 0 (black) on")
    whites = (65535,) if is_png else (1, *_WHITES) if pixels.dtype.kind == "f" else _WHITES
    white = next((white for white in whites if most <= white), most)
    return Image.fromarray(np.rint(pixels.astype(np.float32) * (255 / white)).clip(0, 255).astype(np.uint8))

"""FP8 training: formats, scaling recipes, and a linear layer that multiplies 8-bit numbers. It imports torch alone.

[Note: FP8] A matrix is *quantized* tile by tile: each tile has one fp32 *scale*, a value becomes
`cast(clamp(value * scale))`, and is read back as `payload * scale_inv`, with `scale_inv = 1 / scale`. A recipe says
which format and which tiles each of the three operands has, and where scales come from:

| recipe    | activations      | weights          | gradients        | scale of a tile                              |
|-----------|------------------|------------------|------------------|----------------------------------------------|
| `current` | e4m3, whole      | e4m3, whole      | e5m2, whole      | format's largest / amax, now                 |
| `block`   | e4m3, 1x128      | e4m3, 128x128    | e4m3, 1x128      | the same, rounded down to a power of two     |
| `mx`      | e4m3, 1x32       | e4m3, 1x32       | e4m3, 1x32       | 8-bit exponent of amax / largest, rounded up |
| `mx_32x32`| e4m3, 1x32       | e4m3, 32x32      | e4m3, 1x32       | the same                                     |

The first three are TransformerEngine's `Float8CurrentScaling`, `Float8BlockScaling` and `MXFP8BlockScaling` in their
defaults. A tile that is longer in one direction lies along the dimension that the product
sums over; so an operand of two products is quantized twice, from the unquantized values (TransformerEngine's rowwise
and columnwise). `mx_32x32` is torchtitan's MXFP8 (its pull request 4203): each line of a 32x32 tile is an MX block of
the tile's exponent, whichever way it is read, so that one payload serves both directions. Its weights have other bits
than those of `mx`: a value rounds to 0 where it is small beside the largest of 1024, not of 32.

[Note: Odd tiles] An amax is the largest magnitude in a tile of what is not NaN, so that it is one number whatever order
it is found in, as TransformerEngine's kernels find it (`fmaxf`). Where that is 0 (a tile of zeros, or of NaN alone) or
infinite, the scale is 1. A cast saturates: infinities become the format's largest number, NaN stays NaN. Under `mx` and
`mx_32x32` an infinite amax gives the largest exponent, 2^127, under which finite values vanish and infinities come back
as such.
"""

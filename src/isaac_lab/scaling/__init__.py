r"""What ζ* would cost on a GPT that does not fit here: compute, memory and communication under FSDP2, on paper.

The formulas follow what the library does, operator by operator; `tests/scaling` holds each of them against a
count or a measurement. A layer has $n$ inputs and $m$ outputs; a GPU sees $T$ tokens in a micro-batch, $k$ rows of which feed
a conditioner; there are $G$ GPUs. A number of floating-point operations is twice the number of multiply-adds.
"""

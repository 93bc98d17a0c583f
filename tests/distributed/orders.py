"""What test_orders.py runs on two processes: loops under DDP and FSDP2, with buckets of every size, against the definition.

Run by torchrun, with the tests on the path; writes, for each loop, form and size, the largest relative error over ranks and
parameters, and whether the bits are those of a bucket of one weight.
"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import definition
from reference import relative_error
from test_orders import FORMS, RANKED, SIZES, Form, Ranked, Run, bucket_of, on_this_rank


def check(ranked: Ranked, form: Form) -> dict[int, tuple[float, bool]]:
    # Without a wrapper nobody talks to the others, so that the mean can be taken by hand.
    expected = on_this_rank(Ranked(ranked.loop), Run(form, definition.attach))
    for gradient in expected.values():
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size()
    found, first = {}, None
    for size in SIZES:
        with bucket_of(size):
            seen = on_this_rank(ranked, Run(form))
        first = first or seen
        error = max(relative_error(seen[name], gradient) for name, gradient in expected.items())
        different = any(not torch.equal(seen[name], value) for name, value in first.items())
        worst = torch.tensor([error, different], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        found[size] = worst[0].item(), not worst[1].item()
    return found


def main(path: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {f"{name}, {form}": check(ranked, FORMS[form]) for name, ranked in RANKED.items() for form in FORMS}
    if dist.get_rank() == 0:
        path.write_text(json.dumps(found))
    dist.barrier()
    os._exit(0)  # for the reason that restart.py gives


if __name__ == "__main__":
    main(Path(sys.argv[1]))

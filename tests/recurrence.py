"""LSTM, GRU and RNN written out, one sequence and one step at a time, with every row that every matrix multiplies."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from reference import zeta_star


class Recurrence:
    """Runs a recurrent layer of torch by the book and remembers rows and products.

    `rows[name][sample]` are what the matrix of that name multiplied, `products[name][sample]` what came out, with its gradient
    after a backward pass.
    """

    def __init__(self, module: nn.RNNBase) -> None:
        self.module = module
        self.rows: dict[str, list[list[Tensor]]] = defaultdict(list)
        self.products: dict[str, list[list[Tensor]]] = defaultdict(list)

    def __call__(
        self, sequences: Sequence[Tensor], states: Sequence[Tensor], dropped: Sequence[Sequence[Tensor]] = ()
    ) -> Tensor:
        """The sum of squares of all outputs and last states.

        Args:
            sequences: (length, features) for each sample.
            states: h_0, for an LSTM h_0 and c_0; (layers × directions, samples, features).
            dropped: For each layer but the last and each sample, what its outputs are multiplied by.
        """
        module, total = self.module, torch.zeros((), dtype=torch.float64)
        directions = 2 if module.bidirectional else 1
        for sample, x in enumerate(sequences):
            for layer in range(module.num_layers):
                outputs = []
                for direction in range(directions):
                    place = layer * directions + direction
                    first = [state[place, sample] for state in states]
                    order = range(len(x)) if direction == 0 else range(len(x) - 1, -1, -1)
                    output, last = self._one_way(x, first, order, f"l{layer}" + "_reverse" * direction, sample)
                    outputs.append(output)
                    total = total + sum(state.square().sum() for state in last)
                x = torch.cat(outputs, -1)
                if dropped and layer < module.num_layers - 1:
                    x = x * dropped[layer][sample]
            total = total + x.square().sum()
        return total

    def _one_way(
        self, x: Tensor, first: list[Tensor], order: Sequence[int], name: str, sample: int
    ) -> tuple[Tensor, list[Tensor]]:
        h, outputs = first[0], [torch.empty(0)] * len(x)
        c = first[1] if len(first) > 1 else None
        for t in order:
            gates_x = self._times(f"weight_ih_{name}", x[t], sample, f"bias_ih_{name}")
            gates_h = self._times(f"weight_hh_{name}", h, sample, f"bias_hh_{name}")
            if self.module.mode == "LSTM":
                i, f, g, o = (gates_x + gates_h).chunk(4)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                if self.module.proj_size:
                    h = self._times(f"weight_hr_{name}", h, sample, None)
            elif self.module.mode == "GRU":
                (r, z, n), (r_h, z_h, n_h) = gates_x.chunk(3), gates_h.chunk(3)
                r, z = (r + r_h).sigmoid(), (z + z_h).sigmoid()
                h = (1 - z) * (n + r * n_h).tanh() + z * h
            else:
                h = (gates_x + gates_h).tanh() if self.module.mode == "RNN_TANH" else (gates_x + gates_h).relu()
            outputs[t] = h
        return torch.stack(outputs), [h] if c is None else [h, c]

    def _times(self, name: str, row: Tensor, sample: int, bias: str | None) -> Tensor:
        product = self.module.get_parameter(name) @ row
        if bias is not None and self.module.bias:
            product = product + self.module.get_parameter(bias)
        product.retain_grad()
        for kept, what in ((self.rows, row.detach()), (self.products, product)):
            while len(kept[name]) <= sample:
                kept[name].append([])
            kept[name][sample].append(what)
        return product

    def conditioned(self, damping: float, sharing: str = "expand", *, joint: bool = False) -> dict[str, Tensor]:
        """ζ* of each matrix, by the definition; a joint bias is the last column."""
        result = {}
        for name, samples in self.rows.items():
            a = torch.stack([row for rows in samples for row in rows])
            g = torch.stack([product.grad for products in self.products[name] for product in products])
            r = torch.stack([torch.stack(rows).mean(0) for rows in samples]) if sharing == "reduce" else a
            if joint and "weight_hr" not in name:
                a, r = (torch.cat([x, torch.ones(len(x), 1).double()], 1) for x in (a, r))
            # λ ∇ (rᵀr/k + λI)⁻¹: of the rows themselves that is the definition, of averages what "reduce" means.
            factor = r.T @ r / len(r) + damping * torch.eye(r.shape[1], dtype=torch.float64)
            result[name] = damping * (g.T @ a) @ torch.linalg.inv(factor)
            if sharing == "expand":
                torch.testing.assert_close(result[name], zeta_star(g, a, damping), rtol=1e-10, atol=1e-12)
        return result

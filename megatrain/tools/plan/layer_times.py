"""Times of a layer, of the head and of the embedding on one rank, for one micro-batch.

    sizes of a layer, layout ─> GEMMs            ─┐
                                attention         ├─> forward, gradients of inputs, weight gradients
                                memory-bound      │
                                collectives     ──┘

A rank has t tokens: s / cp * b. Under sequence parallelism, norms and the residual stream have t / tp of them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from megatrain.config.model_spec.attention import AttentionSpec
from megatrain.config.model_spec.experts import ExpertsSpec
from megatrain.config.model_spec.layer import LayerSpec
from megatrain.config.model_spec.linear import Linear
from megatrain.config.model_spec.mlp import MlpSpec
from megatrain.config.model_spec.part import Part
from megatrain.kernels.fp8.rows import SCALE_BYTES
from megatrain.tools.plan.hardware import Cluster
from megatrain.tools.plan.layouts import Layout, Workload
from megatrain.tools.plan.linear_times import Fp8, Gemm, Times
from megatrain.tools.plan.network import Group

_BF16 = 2


@dataclass(frozen=True)
class LayerTimes:
    """Times of the parts of a model in a layout. The fields are the arguments of the calculation."""

    workload: Workload
    layout: Layout
    cluster: Cluster
    fp8: Fp8 | None = None
    """GEMMs of linear layers in FP8; None: in bf16."""

    @property
    def tokens(self) -> float:
        """Tokens of a micro-batch on this rank."""
        return self.workload.tokens(self.layout)

    def layer(self, sizes: LayerSpec) -> Times:
        """Return the times of a layer."""
        by_role = {"mixer": Times(), "mlp": Times()}
        for part in sizes.parts:
            by_role[part.role] += self._part(part)
        mixer, mlp = by_role["mixer"], by_role["mlp"]
        dropout = 20 if self.workload.plan.config.model.hidden_dropout else 0
        norms = self._memory((22 + dropout) * self.workload.hidden * self._rows_of_norms)
        times = mixer + mlp + norms
        times += self._tensor_parallel(sizes, times)
        return times + Times(backward=self._recomputed(times, mixer, mlp, norms))

    def head(self) -> Times:
        """Return the times of the output layer with its loss."""
        rows = self.workload.vocabulary / self.layout.tp
        gemm = Gemm(self.tokens, rows, self.workload.hidden).times(self.cluster)  # never in FP8
        logits = Times(self.cluster.memory_seconds(6 * rows * self.tokens))
        return gemm + logits + self._gathered(1)

    def embedding(self) -> Times:
        """Return the times of the embedding: a lookup, and a sum over tensor ranks."""
        rows = 4 * self.workload.hidden * self.tokens
        return self._memory(2 * rows) + self._gathered(1)

    def multi_token_prediction(self) -> Times:
        """Return the times of all depths of multi-token prediction: a projection, layers and the head each."""
        h, spec = self.workload.hidden, self.workload.plan.derived.model_spec
        projection = Gemm(self.tokens, h / self.layout.tp, 2 * h).times(self.cluster, self.fp8)
        depth = sum(map(self.layer, spec.depth_layers), projection + self.head())
        return sum([depth] * spec.num_depths, Times())

    def _linear(self, gemm: Gemm) -> Times:
        """Return the times of a dense linear layer, with the gradient of its bias."""
        bias = 0 if self.workload.plan.config.model.disable_bias_linear else 2 * gemm.rows * gemm.outputs
        return gemm.times(self.cluster, self.fp8) + Times(weight=self.cluster.memory_seconds(bias))

    @property
    def tensor_group(self) -> Group:
        return Group(self.cluster, self.layout.tp)

    @property
    def _rows_of_norms(self) -> float:
        return self.tokens / (self.layout.tp if self.layout.sequence_parallel else 1)

    def _memory(self, num_bytes: float) -> Times:
        """Return the times of memory-bound kernels: a third of their bytes forward, the rest backward."""
        seconds = self.cluster.memory_seconds(num_bytes)
        return Times(seconds / 3, seconds * 2 / 3)

    # ---- parts

    def _part(self, part: Part) -> Times:
        """Return the times of a part; of an unknown one, the times of its GEMMs and of its other weights as if they were one."""
        if isinstance(part, ExpertsSpec):
            return self._experts(part)
        if isinstance(part, MlpSpec):
            return self._dense(part)
        h = self.workload.hidden
        times = sum((self._linear(self._gemm(one)) for one in part.linears(h)), Times())
        if isinstance(part, AttentionSpec):
            channels = (part.num_heads + part.num_query_groups) * part.head_dim
            copies = 60 if part.latent is not None else 12  # plain operators put heads of latents together
            rope = self._memory(copies * channels / self.layout.tp * self.tokens)
            return times + rope + self._attention(part)
        others = part.other_weights(h) / h / self.layout.tp
        return times + Gemm(self.tokens, others, h).times(self.cluster) if others else times

    def _gemm(self, linear: Linear) -> Gemm:
        """Return a dense GEMM on this rank."""
        tp = self.layout.tp
        return Gemm(
            self.tokens,
            linear.local_outputs(tp),
            linear.local_inputs(tp),
            is_row_parallel=linear.split == "inputs",
        )

    def _attention(self, sizes: AttentionSpec) -> Times:
        """Return the times of causal attention; a ring of context ranks overlaps its messages with it."""
        rates, length, cp = self.cluster.rates, self.workload.seq_length, self.layout.cp
        flops = self.tokens * length * sizes.pair_channels / self.layout.tp
        part = length / (2 * cp) if cp > 1 else length  # a rank has two parts of a sequence, for equal work
        forward = rates.attention * part / (part + rates.attention_length)
        forward *= min(1.0, sizes.head_dim / rates.full_head)
        backward = rates.attention_backward * part / (part + rates.attention_backward_length)
        if self.workload.plan.config.model.attention_dropout:
            forward, backward = (
                forward * rates.dropout_attention,
                backward * rates.dropout_attention_backward,
            )
        times = Times(
            flops / self.cluster.compute_rate(forward), 2.5 * flops / self.cluster.compute_rate(backward)
        )
        if cp == 1:
            return times
        keys = max(sizes.num_query_groups / self.layout.tp, 1) * (sizes.head_dim + sizes.v_head_dim)
        message = Group(self.cluster, cp, self.layout.tp).message(_BF16 * keys * self.tokens)
        steps, queries = cp - 1, sizes.num_heads * sizes.head_dim / self.layout.tp
        merges = self._memory(24 * cp * queries * self.tokens)
        return merges + Times(max(times.forward, steps * message), max(times.backward, 3 * steps * message))

    def _dense(self, mlp: MlpSpec) -> Times:
        times = sum((self._linear(self._gemm(one)) for one in mlp.linears(self.workload.hidden)), Times())
        width = mlp.ffn_hidden_size / self.layout.tp
        return times + self._memory((16 if mlp.is_gated else 10) * width * self.tokens)

    def _experts(self, experts: ExpertsSpec) -> Times:
        """Return the times of routed and shared experts with their dispatch; loads are equal."""
        layout, h = self.layout, experts.latent_size or self.workload.hidden
        local = experts.num_experts // layout.ep
        rows = self.tokens / layout.tp * experts.top_k * layout.etp
        width = experts.ffn_hidden_size / layout.etp
        gate = 2 if experts.is_gated else 1
        gemms = Gemm(rows, gate * width, h, local), Gemm(rows, h, width, local)
        times = sum((one.times(self.cluster, self.fp8) for one in gemms), Times())
        times += self._memory((16 if experts.is_gated else 10) * width * rows)
        times += self._memory(32 * h * rows + 12 * experts.num_experts * self._rows_of_norms)
        if self._sends_codes:  # which weight gradients decode
            times += Times(weight=self.cluster.cast_seconds(3 * h * rows))
        shared = Times() if experts.shared is None else self._dense(experts.shared)
        return times + shared + self._dispatch(experts, h, shared)

    def _dispatch(self, experts: ExpertsSpec, hidden: int, shared: Times) -> Times:
        """Return the exposed times of communication around experts (parallel/expert_parallel.py).

        An all-gather hides in nothing forward, since the router is short. The sums of the outputs, and in the backward pass
        the gather of their gradients, overlap the shared expert; the sums of the rows' gradients overlap the weight gradients
        of experts. An all-to-all sends a token once to each rank that has experts of it, and the host waits for the counts:
        another pass does not hide this wait.
        """
        ep, layout, rates = self.layout.ep, self.layout, self.cluster.rates
        if ep == 1:
            return Times()
        row = self.tokens / layout.tp * hidden * _BF16
        if not self.workload.gathers_tokens(ep):
            sums, wait = self._sent(experts, row), Times(rates.host_wait_seconds)
            return sums + wait + (self._sent_codes(experts, hidden) if self._sends_codes else sums)
        ranks = ep * layout.etp
        group = Group(self.cluster, ranks)
        one = group.all_gather(row * ranks)
        overlapped = one * group.exposed
        forward = one + max(one - shared.forward, overlapped)
        backward = max(one - shared.backward - shared.weight, overlapped) + overlapped
        sends = forward + backward
        return Times(forward, backward, sends=sends, exposed_sends=min(4 * overlapped, sends))

    @property
    def _sends_codes(self) -> bool:
        return self.fp8 is not None and self.workload.plan.config.experts.moe_fp8_dispatch

    def _sent_codes(self, experts: ExpertsSpec, hidden: int) -> Times:
        """Return the times of tokens, and of gradients of sums, that are sent in FP8.

        Tokens are cast, and copied to rows with their scales; those that a rank receives are decoded.
        """
        tokens, ep = self.tokens / self.layout.tp, self.layout.ep
        received = tokens * self.layout.etp * ep * experts.router.share_of_tokens(ep)
        seconds = self.cluster.cast_seconds(3 * (tokens + received) * hidden)
        seconds += self.cluster.memory_seconds(2 * tokens * hidden)
        return Times(seconds, seconds) + self._sent(experts, tokens * (hidden + SCALE_BYTES))

    def _sent(self, experts: ExpertsSpec, row: float) -> Times:
        """Return the times of the all-to-alls that send tokens, or that return their sums; `row`: bytes of a rank's tokens.

        Where ranks of a host forward tokens, these are permuted once more on the way.
        """
        ep, etp, router = self.layout.ep, self.layout.etp, experts.router
        group = Group(self.cluster, ep, etp)
        row *= etp  # the etp ranks of an expert gather the tokens that each of them receives
        to_rank = row * router.share_of_tokens(ep)
        inside = self.workload.ranks_that_forward(group, etp)
        if inside == 1:
            one = group.all_to_all(to_rank)
            return Times(one, one, sends=2 * one, exposed_sends=2 * one * group.exposed)
        hosts = ep // inside
        to_host = row * router.share_of_tokens(hosts)
        peers, host = Group(self.cluster, hosts, inside * etp), Group(self.cluster, inside, etp)
        over, within = peers.all_to_all(to_host), host.forwarded(hosts * to_rank)
        copies = self.cluster.memory_seconds(2 * hosts * to_host)
        exposed = over * peers.exposed + within * host.exposed
        one = over + within
        return Times(one + copies, one + copies, sends=2 * one, exposed_sends=2 * exposed)

    # ---- communication of tensor parallelism, recomputation

    def _tensor_parallel(self, sizes: LayerSpec, layer: Times) -> Times:
        """Return the exposed time of the collectives around column- and row-parallel layers of a layer.

        Args:
            layer: times without these collectives.
        """
        pairs = sum(not isinstance(part, ExpertsSpec) for part in sizes.parts)
        overlaps = self.workload.overlaps_products(self.layout, self.cluster.gpu.capability)
        if self.layout.tp > 1 and pairs and overlaps and self.fp8 is None:
            return self._copied(pairs, layer)
        return self._gathered(pairs)

    def _copied(self, pairs: int, layer: Times) -> Times:
        """Return the time that --tp-comm-overlap adds: slower kernels, sums of parts, and copies longer than the kernels.

        Copy engines send forward an all-gather and a reduce-scatter for each pair; backward these of gradients, and the
        input of the weight gradient. A reduce-scatter ends with a sum of the parts of all ranks.
        """
        rates, tp = self.cluster.rates, self.layout.tp
        num_bytes = _BF16 * self.workload.hidden * self.tokens
        sent = pairs * (tp - 1) * self.tensor_group.message(num_bytes / tp)
        sums = pairs * self.cluster.memory_seconds(num_bytes * (tp + 1) / tp)
        added = []
        for kernels, copies in ((layer.forward, 2 * sent), (layer.backward + layer.weight, 3 * sent)):
            added.append(max(copies * rates.tensor_overlap, copies - kernels) + sums)
        return Times(*added)

    def _gathered(self, pairs: int) -> Times:
        """Return the exposed time of collectives of `pairs` of a column- and a row-parallel layer.

        With sequence parallelism: forward an all-gather and a reduce-scatter; backward the all-gather of the output's
        gradient, and an all-gather and a reduce-scatter that GEMMs overlap. Without: an all-reduce each way, the latter
        overlapped. FP8 codes are half of the bytes of a gather.
        """
        if self.layout.tp == 1 or not pairs:
            return Times()
        group = self.tensor_group
        num_bytes = _BF16 * self.workload.hidden * self.tokens
        if not self.layout.sequence_parallel:
            one = group.all_reduce(num_bytes)
            return Times(pairs * one, pairs * one * group.exposed)
        has_codes = self.fp8 is not None and self.fp8.gather_size > 1
        gather, reduction = (
            group.all_gather(num_bytes / 2 if has_codes else num_bytes),
            group.all_gather(num_bytes),
        )
        overlapped = (gather + reduction) * group.exposed
        return Times(pairs * (gather + reduction), pairs * (gather + overlapped))

    def _recomputed(self, whole: Times, mixer: Times, mlp: Times, norms: Times) -> float:
        """Return the seconds that recomputation adds to the backward pass."""
        if self.layout.recompute == "full":
            return whole.forward
        seconds, modules = 0.0, self.layout.modules
        for name, part in (("layernorm", norms), ("mlp", mlp), ("moe", mlp), ("core_attn", mixer)):
            if name in modules:
                seconds += part.forward * (0.5 if name == "core_attn" else 1.0)
        if "mla_up_proj" in modules:
            seconds += 0.3 * mixer.forward
        if "moe_act" in modules and "moe" not in modules:
            seconds += 0.1 * (mlp.forward - mlp.sends / 2)
        return seconds


@functools.lru_cache(maxsize=65536)
def layer_weights(workload: Workload, sizes: LayerSpec, tp: int, ep: int, etp: int) -> tuple[float, float]:
    """Return the weights of a layer on one rank: dense weights, and weights of experts."""
    h, experts = workload.hidden, sizes.experts
    dense, routed = 2.0 * h + (0 if experts is None else h * experts.num_experts), 0.0
    for one in sizes.linears(h):
        ranks = etp if one.num_experts else tp
        weights = one.local_outputs(ranks) * one.local_inputs(ranks)
        if one.num_experts:
            routed += weights * one.num_experts / ep
        else:
            dense += weights
    return dense, routed

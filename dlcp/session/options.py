# SPDX-License-Identifier: Apache-2.0
"""The options: an argument beats the environment (``DLCP_*``), which beats a file, which beats the default."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from dlcp import configuration
from dlcp.collectives.bucket import LayerBounds, ReduceOptions
from dlcp.collectives.choice import COLLECTIVES, SERVER, Topology, flow_weight
from dlcp.collectives.pipeline import check_server_defers, check_stages
from dlcp.collectives.reduction_rules import COMBINES, check_samples
from dlcp.configuration import HostPort, OneOf, Range, Trait, Unit
from dlcp.tags import TagPolicy
from dlcp.transport import LossBound, TransportOptions
from dlcp.transport.messages import Share
from dlcp.transport.options import Congestion, FlowWeight, PathCount, Seconds, SwitchHops
from dlcp.transport.path_mtu import PAYLOAD_UNKNOWN
from dlcp.wire import DROP_CLASSES

JobNumber = Annotated[int, Range(0, (1 << 16) - 1)]
Token = Annotated[int, Range(0, (1 << 64) - 1)]
AGREED, SET_ALIKE, OWN, WHOLE_STEP = Trait.AGREED, Trait.SET_ALIKE, Trait.OWN, Trait.WHOLE_STEP
PACKETS = Unit("of a message's packets")


@dataclass(frozen=True, slots=True)
class Options:
    """How DLCP exchanges gradients. Every field of a simple type can be set as ``DLCP_<NAME>``.

    Parameters
    ----------
    loss_bound
        The largest share of a message's packets that may be lost, 0 to 1. It is a ceiling, used under congestion only.
        0.1 leaves convergence unharmed (DLCP, arXiv 2008.08445); with error feedback nothing is lost for good.
    deferral_bound
        The largest share of a message's packets that may be deferred to a later step, 0 to 1: the least valuable ones,
        and only for ranks behind a port far slower than the others', or through a parameter server with a congested
        port (:mod:`dlcp.collectives.deferral`). Of a whole step about two thirds of that share are at most. Only with
        ``error_feedback``, and not around a ring. 0: none.
    immediate
        Stop at the bound even without congestion, as the paper does.
    error_feedback
        Send what was lost with the next step.
    rescale
        Divide sums by how many ranks delivered. By default (None) exactly where ``error_feedback`` is off. Both at once
        are refused, because they are not stable: the next step would take back what the division counts too much. Of a
        packet that one of four ranks delivers in every step, the average would be three times as large, with the other
        sign, in each step after.
    adaptive_shards
        Ranks behind a congested port add up less. FSDP2 decides itself what ranks add up.
    collective
        ``direct`` (every rank adds up a shard), ``ring``, ``server`` (a parameter server adds up), or
        ``auto``: whichever of direct and ring suits the size.
    bind
        Address of this rank's UDP socket, ``host:port``; port 0 is the first free DLCP port. By default that, at the
        addresses that the kernel's routes to the rendezvous and to the other ranks say (``docs/cluster.md``).
    advertise
        Address where others reach this rank, if not ``bind``.
    server
        Address of the parameter server, ``host:port``: what ``dlcp server --bind`` says. It takes all options of the
        job from its workers.
    job
        Job number, 0 to 65535, by which a switch knows the job.
    token
        Session token. If it is 0, rank 0 draws it. Ranks of PyTorch that have a secret derive it from that, and from
        what each of them draws.
    secret_file
        File with the job's secret, by which ranks know each other when they meet (``docs/security.md``). Without a
        file, ``DLCP_SECRET`` may hold it; without either, ranks without PyTorch meet by a key of the user's.
    tls
        Folder with ``tls.crt``, ``tls.key`` and ``ca.crt``, as Kubernetes mounts a certificate: ranks without PyTorch
        meet over TLS, both sides with certificates; rank 0's names ``MASTER_ADDR``. PyTorch's store has no TLS.
    payload_bytes
        Bytes of a message per packet: 1440 fill an MTU of 1500. 0 finds out what passes on every path, up to an MTU of
        9000. Whatever is chosen is tried with real packets first; if it does not pass, the largest that does is taken.
    shared_memory
        Let ranks that share a network namespace, and so a host, exchange packets through memory instead of their
        sockets: nothing is queued, dropped or lost there. Not with ``immediate``, and not where others reach this rank
        by an ``advertise`` of its own, which leads through a network.
    congestion, tagged, silence_s, deadline_s, switch_hops, paths
        See :class:`dlcp.transport.TransportOptions`.
    flow_weight
        The share of a flow that each of this rank's flows counts as; 0, the default, lets all of a job into a port
        count as one. 1 gives a job as much as TCP would have, where several of its ranks send into one port.
    meet_s
        How long the ranks wait for each other when they join.
    fallback
        Go on over the framework's own all-reduce, or in a group over its store, if DLCP cannot be used, at the start or
        later. Off, that is an error.
    tag_policy
        See :class:`dlcp.tags.TagPolicy`.
    protected_share
        The share of packets that are protected, those of the largest values, in every layer; the rest is divided evenly
        among the drop classes. Below 0, the default (-1), ``tag_policy`` says which.
    layer_bounds
        Layers with a loss bound of their own, by name: ``embed*=0, *.norm?.*=0, head.*=0.01``.
    samples
        How many samples this rank's gradients are the mean of in a step; call ``samples`` of the state or group
        when the number changes. Every sample then counts the same. 0, the default: every rank counts the same.
    adapt
        Measure while training, and choose bound, classes, compression, collective and deferral by it; those given are
        what it begins with, and no more is deferred than they say. What counts is the time to the same accuracy: what
        takes more steps is charged with them (:mod:`dlcp.convergence`). All ranks choose alike, between two steps.
    compression
        What gradients are compressed with, ``fp16`` or ``topk:0.01`` (:mod:`dlcp.compress`); none by default.
    combine
        What all ranks' gradients become: their ``average``, their ``sum``, or ``adasum``
        (:mod:`dlcp.collectives.reduction_rules`).
    phases
        Hold the bound down to 0.6 % while the gradient's norm changes by half or more
        (:class:`dlcp.tuning.autotuner.Phases`).
    trace
        A folder where each rank notes what it does and when (:mod:`dlcp.timeline`), for ``dlcp trace`` to make a trace
        of; none by default.
    live
        A folder where each rank leaves a snapshot of itself once a second (:mod:`dlcp.session.snapshots`), for
        ``dlcp live`` to show; none by default.
    """

    loss_bound: Annotated[Share, PACKETS, AGREED] = 0.1
    deferral_bound: Annotated[Share, PACKETS, AGREED] = 0.0
    immediate: Annotated[bool, AGREED] = False
    error_feedback: Annotated[bool, AGREED] = True
    rescale: Annotated[bool | None, AGREED] = None
    adaptive_shards: Annotated[bool, AGREED] = True
    collective: Annotated[str, OneOf(COLLECTIVES), AGREED] = "direct"
    bind: Annotated[str, HostPort(), OWN] = ""
    advertise: Annotated[str, HostPort(), OWN] = ""
    server: Annotated[str, HostPort(least_port=1), AGREED] = ""
    job: Annotated[JobNumber, AGREED] = 0
    token: Annotated[Token, Trait.SECRET] = 0
    secret_file: Annotated[str, OWN] = ""
    tls: Annotated[str, Trait.WITHOUT_TORCH, OWN] = ""
    congestion: Congestion = "dctcp"
    flow_weight: Annotated[FlowWeight, Unit("flows")] = 0.0
    switch_hops: SwitchHops = 1
    tagged: bool = True
    payload_bytes: Annotated[int, Unit("bytes"), AGREED] = 0
    shared_memory: bool = True
    paths: PathCount = 12
    silence_s: Seconds = 10.0
    deadline_s: Seconds = 120.0
    meet_s: Seconds = 30.0
    fallback: Annotated[bool, AGREED] = True
    tag_policy: TagPolicy = field(default_factory=TagPolicy)
    protected_share: Annotated[float, Range(-1.0, 1), Unit("of a layer's packets")] = -1.0
    layer_bounds: Annotated[str, AGREED] = ""
    samples: Annotated[int, SET_ALIKE, WHOLE_STEP] = 0
    adapt: Annotated[bool, AGREED, WHOLE_STEP] = False
    phases: Annotated[bool, AGREED, WHOLE_STEP] = False
    compression: Annotated[str, AGREED, WHOLE_STEP] = ""
    combine: Annotated[str, OneOf(COMBINES), AGREED, WHOLE_STEP] = "average"
    trace: Annotated[str, OWN] = ""
    live: Annotated[str, OWN] = ""

    def __post_init__(self) -> None:
        configuration.check(self)
        if self.collective == SERVER and not self.server:
            raise ValueError("collective 'server' needs the server's address: server='host:port' or DLCP_SERVER")
        if self.server and self.collective != SERVER:
            raise ValueError(
                f"server={self.server!r} has no effect with collective {self.collective!r}: set collective='server', "
                "or omit the server"
            )
        check_samples(self.samples)
        if self.samples and (self.combine != "average" or self.compression == "signsgd"):
            votes = self.compression == "signsgd"
            what = "compression 'signsgd', which counts votes" if votes else f"combine {self.combine!r}"
            raise ValueError(
                f"samples are the weights of an average; they say nothing to {what}: leave one of them out"
            )
        if self.adapt and self.combine != "average":
            raise ValueError(f"adapt chooses among ways to average; with combine {self.combine!r} it has to be off")
        check_stages(self.compression, self.combine, self.collective, fallback=self.fallback)
        if self.collective == SERVER and self.deferral_bound:
            check_server_defers(self.compression, self.layer_bounds)
        self.transport(1)
        try:
            LayerBounds.parse(self.layer_bounds)
        except ValueError as error:
            raise ValueError(f"layer_bounds: {error}") from None
        self.reduction()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Options":
        """Return the defaults, overridden by a file and by ``DLCP_*`` variables; see :mod:`dlcp.configuration`.

        Raises
        ------
        ValueError
            A variable or a line does not hold what it should; the message names it.
        """
        return configuration.build(cls, environment)

    def bound(self) -> LossBound:
        """Return the bound on what gradients may lose and what of them may be deferred."""
        return LossBound(self.loss_bound, self.immediate, self.deferral_bound)

    def reduction(self) -> ReduceOptions:
        """Return what an all-reduce may lose and how it makes up for it."""
        return ReduceOptions(
            self.bound(),
            self.error_feedback,
            not self.error_feedback if self.rescale is None else self.rescale,
            self.adaptive_shards,
            LayerBounds.parse(self.layer_bounds),
        )

    def classes(self) -> TagPolicy:
        """Return how packets are tagged."""
        if self.protected_share < 0:
            return self.tag_policy
        rest = (1 - self.protected_share) / (DROP_CLASSES - 1)
        shares = (self.protected_share, *([rest] * (DROP_CLASSES - 1)))
        return replace(self.tag_policy, front_shares=shares, back_shares=shares)

    @property
    def weighted(self) -> bool:
        """Whether every sample counts the same, instead of every rank."""
        return self.samples > 0

    def terms(self) -> dict[str, object]:
        """Return the values on which all ranks must agree, by option; for ``samples`` only whether it is set."""
        values = [(each, getattr(self, each.name)) for each in configuration.options_of(Options).values()]
        set_alike = {each.name: "set" if value else "not set" for each, value in values if SET_ALIKE in each.traits}
        return {each.name: value for each, value in values if AGREED in each.traits} | set_alike

    def of_job(self) -> dict[str, object]:
        """Return what is not a rank's own, by option: what a parameter server needs to know of its workers."""
        declared = configuration.options_of(Options)
        return {name: getattr(self, name) for name, each in declared.items() if not each.traits & {OWN, Trait.SECRET}}

    def given(self, trait: Trait) -> list[str]:
        """Return the names of the options with a trait that are not at their defaults."""
        having = [option for option in configuration.options_of(Options).values() if trait in option.traits]
        return [option.name for option in having if getattr(self, option.name) != option.default]

    def transport(self, workers: int, topology: Topology | None = None) -> TransportOptions:
        """Return the options of a worker's endpoint, where ``workers`` take part."""
        declared = configuration.options_of(Options)
        shared = {each.name: getattr(self, each.name) for each in fields(TransportOptions) if each.name in declared}
        shared["flow_weight"] = self.flow_weight or flow_weight(self.collective, range(workers), topology)
        shared["payload_bytes"] = self.payload_bytes or PAYLOAD_UNKNOWN
        if self.advertise:  # whoever reaches this rank by another address knows other ports, too
            shared["paths"] = 1
        return TransportOptions(**shared)

    def with_(self, **changes: Any) -> "Options":
        """Return a copy with some fields changed."""
        return replace(self, **changes)

# SPDX-License-Identifier: Apache-2.0
"""The options of a session. In order of precedence: arguments, the environment (``DLCP_*``), a file, defaults."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from dlcp.collectives.bucket import LayerBounds, ReduceOptions
from dlcp.collectives.choice import AUTO, DIRECT, RING, SERVER, Topology, flow_weight
from dlcp.collectives.reduction_rules import COMBINES, check_samples
from dlcp.collectives.stages import check_stages
from dlcp.inputs import configuration
from dlcp.inputs.configuration import LOSS_BOUND, ByPattern, HostPort, Means, OneOf, Range, Trait, Unit
from dlcp.inputs.error_text import closest
from dlcp.policies.arms import AUTO_PRECISION, EXACT, HALF_NAMES, HALF_PRECISION, PRECISIONS, is_coarse
from dlcp.transport import LossBound, TransportOptions
from dlcp.transport.messages import SHARE
from dlcp.transport.settings import Congestion, Seconds
from dlcp.values.tags import TagPolicy

JobNumber = Annotated[int, Range(0, (1 << 16) - 1)]
AGREED, SET_ALIKE, OWN, WHOLE_STEP = Trait.AGREED, Trait.SET_ALIKE, Trait.OWN, Trait.WHOLE_STEP
BOUNDS = ByPattern(SHARE)
ROUTES = AUTO_ROUTE, DLCP_ROUTE, FRAMEWORK_ROUTE = "auto", "dlcp", "framework"


@dataclass(frozen=True, slots=True)
class Options:
    """How DLCP exchanges gradients. Each field of a simple type can also be set as ``DLCP_<NAME>``.

    Fields that are not given as arguments come from the environment, a file, or their defaults, each on its own. In
    another process, pickled options keep their arguments, and take all else from the environment there.

    Parameters
    ----------
    loss_bound
        The largest share of a message's packets that may be lost, 0 to 1. Losses are accepted only under congestion.
        0.1 does not harm convergence (DLCP, arXiv 2008.08445). With error feedback, lost gradients are sent later.
        Layers may have other bounds, by name: ``0.1, embed*=0, *.norm?.*=0, head.*=0.01``. The first match counts.
    precision
        How much precision gradients may lose: ``exact`` (none: all bits, and no losses), ``auto`` (whatever costs no
        more steps than bfloat16), or ``fast`` (also 4 bits, for models that tolerate it). With ``auto`` and ``fast``
        the ranks time the ways to average that are left, and use the fastest (:mod:`dlcp.policies.arms`). A number
        fixes the bits of each value on the wire: ``32`` (all, for any number format), ``16``, ``8`` or ``4``. Values
        are rounded in blocks of 32 that share a scale (:mod:`dlcp.values.planes`), and with error feedback rounding
        errors are sent with the next step. Without it, ``auto`` and ``fast`` are 32. With a compression whose output
        adds up, ``randomk`` or ``powersgd``, it applies to that output. No effect on float64, nor on messages of a few
        packets.
    immediate
        End a message as soon as its bound is met, even without congestion, as the paper does.
    error_feedback
        Send lost gradients with the next step. Without it, each sum is divided by the number of ranks whose
        contributions arrived.
    collective
        ``direct`` (every rank sums a shard, a smaller one behind a congested port), ``ring``, ``auto`` (direct or ring,
        whichever is faster for the size), or ``server:HOST:PORT`` (a parameter server sums). The address is the one
        given to ``dlcp server --bind``. The server receives the job's options from its workers.
    bind
        Address of this rank's UDP socket, ``host:port`` or ``[ipv6]:port``; port 0 means the first free DLCP port. The
        default is that port at the addresses that the kernel's routes to the rendezvous and to the other ranks use
        (``docs/cluster.md``).
    advertise
        Address at which other ranks reach this one, if not ``bind``.
    job
        Job number, 0 to 65535, which identifies the job to switches.
    secret_file
        File with the job's secret, with which ranks authenticate each other when they meet (``docs/security.md``). It
        may be in ``DLCP_SECRET`` instead. If neither is set, ranks without PyTorch use a per-user key.
    tls
        Folder with ``tls.crt``, ``tls.key`` and ``ca.crt``, as Kubernetes mounts a certificate. Ranks without PyTorch
        then meet over TLS, and both sides present certificates; rank 0's must name ``MASTER_ADDR``. PyTorch's store has
        no TLS.
    payload_bytes
        Payload of a packet in bytes; 1440 fills an MTU of 1500, and 1416 over IPv6. 0, the default, selects the largest
        that passes on every path, up to an MTU of 9000. Every choice is tested with packets on all paths first; if it
        does not pass, DLCP uses the largest payload that does.
    shared_memory
        Let ranks in the same network namespace, and so on the same host, exchange packets through memory instead of
        sockets; nothing is queued or lost there. No effect with ``immediate``, or for a rank with ``advertise``, whose
        peers reach it through a network.
    congestion, tagged, foreign_trimming, silence_s, deadline_s
        See :class:`dlcp.transport.TransportOptions`.
    meet_s
        How long ranks wait for each other when they join.
    fallback
        If DLCP cannot be used, at the start or later, continue with the framework's own all-reduce, or in a group with
        its store. If off, that is an error.
    elastic
        The fewest ranks with which training goes on without those that have ended: 2 lets it end if just one is left.
        With 0, the default, a rank that ends also ends the others. Averages are then those of the ranks that are left.
        Without a parameter server that has ended, they exchange directly. It needs ``fallback``, and goes neither with
        ``samples`` nor with ``compression`` or another ``combine`` than ``average``.
    route
        Who averages gradients while DLCP works: ``dlcp``; ``framework``, with its own all-reduce, or FSDP2's
        reduce-scatter; or ``auto``: the ranks time steps with each, and use the faster one (:mod:`dlcp.policies.arms`).
        ``auto`` means ``dlcp`` without PyTorch, between ranks that share memory, with the backend ``dlcp``, with a
        parameter server, and with ``samples``, ``compression``, a ``combine`` other than ``average``, or a
        ``precision`` of 16 bits or less; but for ranks that share memory, ``framework`` is then an error.
    tag_policy
        See :class:`dlcp.values.tags.TagPolicy`.
    samples
        Number of samples that this rank's gradients are the mean of; call ``samples`` of the state or group when it
        changes. Every sample then has the same weight. With 0, the default, every rank has the same weight.
    compression
        Compressor of gradients, such as ``topk:0.01`` (:mod:`dlcp.compress`); none by default. ``fp16`` and ``bf16``
        are other names of ``precision=16``.
    combine
        How the ranks' gradients are combined: ``average``, ``sum`` or ``adasum``
        (:mod:`dlcp.collectives.reduction_rules`).
    trace
        Folder in which each rank records its events (:mod:`dlcp.host.timeline`), for ``dlcp trace``; none by default.
    live
        Folder in which each rank writes a snapshot once a second (:mod:`dlcp.session.snapshots`), for ``dlcp live``;
        none by default.

    Attributes
    ----------
    arguments
        Names of the fields that were given as arguments.

    Raises
    ------
    ValueError
        An argument, a variable or a line of the file has an invalid value, or they contradict each other; the message
        names them.
    TypeError
        There is no such option.
    """

    loss_bound: Annotated[float | str, BOUNDS, Unit("of a message's packets"), AGREED] = LOSS_BOUND
    precision: Annotated[str, OneOf(PRECISIONS), Unit("bits"), AGREED] = AUTO_PRECISION
    immediate: Annotated[bool, AGREED] = False
    error_feedback: Annotated[bool, AGREED] = True
    collective: Annotated[str, OneOf((AUTO, DIRECT, RING), addressed=SERVER), AGREED] = DIRECT
    bind: Annotated[str, HostPort(), OWN] = ""
    advertise: Annotated[str, HostPort(), OWN] = ""
    job: Annotated[JobNumber, AGREED] = 0
    secret_file: Annotated[str, OWN, Trait.PROTECTS] = ""
    tls: Annotated[str, Trait.WITHOUT_TORCH, OWN, Trait.PROTECTS] = ""
    congestion: Congestion = "dctcp"
    tagged: bool = True
    foreign_trimming: bool = False
    payload_bytes: Annotated[int, Unit("bytes"), AGREED] = 0
    shared_memory: bool = True
    silence_s: Seconds = 10.0
    deadline_s: Seconds = 120.0
    meet_s: Seconds = 30.0
    fallback: Annotated[bool, AGREED] = True
    elastic: Annotated[int, Range(0, (1 << 16) - 1), AGREED, Trait.WITHOUT_TORCH] = 0
    route: Annotated[str, OneOf(ROUTES), AGREED] = AUTO_ROUTE
    tag_policy: TagPolicy = field(default_factory=TagPolicy)
    samples: Annotated[int, SET_ALIKE, WHOLE_STEP] = 0
    compression: Annotated[str, Means(HALF_NAMES, "precision", HALF_PRECISION), AGREED, WHOLE_STEP] = ""
    combine: Annotated[str, OneOf(COMBINES), AGREED, WHOLE_STEP] = "average"
    trace: Annotated[str, OWN] = ""
    live: Annotated[str, OWN] = ""
    arguments: frozenset[str] = field(init=False, repr=False, compare=False)

    def __new__(cls, *values: object, **named: object) -> "Options":
        """Note which fields are given, and refuse an unknown one by name; they are set as in any dataclass."""
        known = [each.name for each in fields(cls) if each.init]
        for name in named:
            if name not in known:
                raise TypeError(f"there is no option {name!r}{closest(name, known)}")
        self = object.__new__(cls)
        object.__setattr__(self, "arguments", frozenset(known[: len(values)]).union(named))
        return self

    def __post_init__(self) -> None:
        if "compression" in self.arguments and self.compression in HALF_NAMES:
            object.__setattr__(self, "arguments", self.arguments | {"precision"})
        with configuration.layered(self, self.arguments):
            self._check()

    def _check(self) -> None:
        object.__setattr__(self, "precision", str(self.precision))  # 8 is as clear as "8"
        configuration.check(self)
        ratio, layers = BOUNDS.parse("loss_bound", self.loss_bound)
        # Ranks must agree on it, however they write it.
        text = ", ".join([str(ratio), *(f"{pattern}={share}" for pattern, share in layers)])
        object.__setattr__(self, "loss_bound", text if layers else ratio)
        check_samples(self.samples)
        if self.samples and (self.combine != "average" or self.compression == "signsgd"):
            votes = self.compression == "signsgd"
            what = "compression 'signsgd', which counts votes" if votes else f"combine {self.combine!r}"
            raise ValueError(f"samples are the weights of an average and do not apply to {what}: omit one of the two")
        if self.elastic:
            fixed = self.given(WHOLE_STEP) + ["fallback"] * (not self.fallback)
            if fixed:
                raise ValueError(
                    f"elastic lets training go on without ranks that have ended, which {', '.join(fixed)} does not "
                    "allow: omit one of the two"
                )
        if self.route == FRAMEWORK_ROUTE:
            without_effect = self.given(WHOLE_STEP) + ["collective"] * bool(self.server)
            without_effect += [f"precision {self.precision}"] * self.is_coarse
            if without_effect:
                raise ValueError(
                    f"route 'framework' leaves averaging to the framework, which has no {', '.join(without_effect)}: "
                    "omit one of the two"
                )
        check_stages(
            *(self.compression, self.combine, self.algorithm), fallback=self.fallback, precision=self.precision
        )
        self.transport(1)

    def __reduce__(self) -> tuple[Any, ...]:
        protecting = {each.name for each in configuration.options_of(Options).values() if Trait.PROTECTS in each.traits}
        given, others = ({name: getattr(self, name) for name in names} for names in (self.arguments, protecting))
        return _from_kept, (given, others)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> "Options":
        """Return options without arguments: as ``environment`` and the file set them, by default this process's."""
        return cls() if environment is None else configuration.build(cls, environment)

    def bound(self) -> LossBound:
        """Return the loss bound of layers that have none of their own."""
        return LossBound(self._bounds()[0], self.immediate)

    def _bounds(self) -> tuple[float, LayerBounds]:
        ratio, layers = (0.0, ()) if self.precision == EXACT else BOUNDS.parse("loss_bound", self.loss_bound)
        return ratio, LayerBounds(layers)

    def describe_bounds(self) -> str:
        """Return the loss bounds in force, for people: ``10%, embed* 0%``."""
        ratio, layers = self._bounds()
        return ", ".join(f"{pattern} {100 * share:g}%".lstrip() for pattern, share in (("", ratio), *layers.rules))

    def reduction(self) -> ReduceOptions:
        """Return the all-reduce's part of the options: bounds and error feedback."""
        return ReduceOptions(self.bound(), self.error_feedback, self._bounds()[1])

    @property
    def algorithm(self) -> str:
        """The collective without the parameter server's address."""
        return self.collective.partition(":")[0]

    @property
    def server(self) -> str:
        """Address of the parameter server, or ``""`` if there is none."""
        return self.collective.partition(":")[2]

    @property
    def is_coarse(self) -> bool:
        """Whether all steps have a lower precision."""
        return is_coarse(self.precision)

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
        """Return the options of the job for its parameter server, by name: all but each rank's own."""
        declared = configuration.options_of(Options)
        return {name: getattr(self, name) for name, each in declared.items() if OWN not in each.traits}

    def given(self, trait: Trait) -> list[str]:
        """Return the names of the options with a trait that are not at their defaults."""
        having = [option for option in configuration.options_of(Options).values() if trait in option.traits]
        return [option.name for option in having if getattr(self, option.name) != option.default]

    def transport(self, workers: int, topology: Topology | None = None) -> TransportOptions:
        """Return the options of a worker's endpoint in a session of that many ``workers``."""
        declared = configuration.options_of(Options)
        shared = {each.name: getattr(self, each.name) for each in fields(TransportOptions) if each.name in declared}
        ranks = sorted(topology.hosts) if topology else range(workers)
        shared["flow_weight"] = flow_weight(self.algorithm, ranks, topology)
        if not self.payload_bytes:  # not measured: the default fits Ethernet and IPv4
            del shared["payload_bytes"]
        if self.advertise:  # behind an address translation, peers see ports other than this rank's
            shared["paths"] = 1
        return TransportOptions(**shared)

    def with_(self, **changes: Any) -> "Options":
        """Return a copy with other arguments for some fields."""
        if changes.get("compression") in HALF_NAMES and "precision" not in self.arguments:
            changes = {"precision": AUTO_PRECISION, **changes}
        changed = replace(self, **changes)
        object.__setattr__(changed, "arguments", self.arguments.union(changes))
        return changed


def _from_kept(given: dict[str, Any], protecting: dict[str, Any]) -> Options:
    """Return options with the arguments ``given``, as this process's environment and file complete them.

    If neither sets the secret, it comes from the environment and file of the process that pickled the options.
    """
    found = Options(**given)
    missing = {name: value for name, value in protecting.items() if value and not getattr(found, name)}
    return found.with_(**missing) if missing else found

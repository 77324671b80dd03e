"""The settings of a training run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..binder import check, setting
from ..errors import ConfigError

if TYPE_CHECKING:
    from .losses import Objective

# What may differ when a run goes on from a checkpoint: nothing that changes a weight.
FREE = (
    "save_every",
    "keep",
    "log_every",
    "eval_every",
    "features",
    "features_memory",
    "tensorboard",
    "store_vocab",
    "threads",
)


def numbers(text: str, key: str, kind: type = float) -> tuple[Any, ...]:
    """Numbers from "1,0.6,0"; ConfigError names ``key``."""
    try:
        return tuple(kind(word) for word in text.split(","))
    except ValueError:
        raise ConfigError(f"{key} = {text!r}: expected numbers with commas between, such as 1,2,3") from None


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """One run: target, data, the draft's sizes, objective, optimizer, and what is written when. Defaults suit a small
    target; for a large one raise layers (5), rank (256), anchors (512) and batch (512)."""

    target: str = setting("the model to draft for: checkpoint directory, bundled name, or synthetic:NAME")
    data: str = setting("file of sequences, as prepared by this trainer")
    out: str = setting("directory of the run: checkpoints, metrics and the draft")
    device: str = setting("auto, cpu, cuda or cuda:N", default="auto")
    threads: int | None = setting("torch threads of training on a CPU; as found when unset", default=None, low=1)
    seed: int = setting("of weights, order and anchors", default=0, low=0, high=2**63 - 1)

    block: int = setting("rows of a block, each drafts a token", default=8, unit="rows", low=1, high=16)
    layers: int = setting("layers of the draft", default=2, low=1, high=64)
    heads: int | None = setting("query heads; hidden / head_dim when unset", default=None, low=1)
    kv_heads: int | None = setting("key and value heads; as heads when unset", default=None, low=1)
    head_dim: int | None = setting(
        "channels of a head; 128, or 32 for a narrow target, when unset", default=None, low=2
    )
    width: int | None = setting("of the feed-forward layers; three times hidden when unset", default=None, low=1)
    taps: str | None = setting(
        "target layers whose residuals the draft reads, as 1,6,13; up to five spread over 1 to N - 3 when unset",
        default=None,
    )
    mask_id: int | None = setting(
        "token of the rows to be filled; the target's padding when unset", default=None, low=0
    )
    theta: float = setting("base of the draft's rotary positions", default=1e6)
    markov: str = setting(
        "the head that corrects a row by the token before", default="vanilla",
        choices=("none", "vanilla", "gated", "rnn"),
    )  # fmt: skip
    rank: int = setting("of the Markov head", default=64, low=1)
    confidence: bool = setting("train a confidence head", default=True)
    confidence_markov: bool = setting("the confidence head reads the token before, too", default=True)
    start: str | None = setting("directory of a draft of the same sizes to start from", default=None)
    only: str | None = setting(
        "train only tensors whose names begin so, as confidence_head or fc,hidden_norm; all when unset", default=None
    )

    ce: float = setting("weight of the cross entropy with the sequence's own token", default=0.1, low=0)
    l1: float = setting("weight of the L1 distance to the target's law", default=0.9, low=0)
    conf: float = setting("weight of the confidence head's loss", default=1.0, low=0)
    accept: float = setting("weight of the expected accept length", default=0.0, low=0)
    accept_ramp: int = setting("steps over which that weight grows from 0", default=0, unit="steps", low=0)
    decay: float = setting("row k of a block counts exp(-k / decay); 0: all alike", default=4.0, low=0)
    temperatures: str = setting("of distillation, averaged; 0 is the target's argmax", default="1")
    conf_temperatures: str | None = setting(
        "of the chances that the confidence head learns, averaged; as temperatures when unset", default=None
    )
    conf_reached: bool = setting(
        "rows count in the confidence head's loss as far as the drafts before them are accepted", default=False
    )

    steps: int = setting("optimizer steps", default=1000, unit="steps", low=1)
    batch: int = setting("sequences of a step", default=16, low=1)
    micro: int = setting("sequences computed at once", default=4, low=1)
    anchors: int = setting("blocks of a sequence, at most", default=64, low=1)
    chunk: int = setting("blocks of a sequence computed at once", default=32, low=1)
    max_length: int = setting("longer sequences are cut", default=2048, unit="tokens", low=2)
    holdout: int = setting("sequences kept out of training, for the validation", default=0, low=0)
    lr: float = setting("highest learning rate", default=6e-4, low=0)
    warmup: float = setting(
        "share of the steps in which it grows from 0; then it falls as a cosine", default=0.04, low=0
    )
    lr_floor: float = setting("share of it that is left at the end", default=0.0, low=0, high=1)
    optimizer: str = setting(
        "adamw, or muon for the matrices inside the layers", default="adamw", choices=("adamw", "muon")
    )
    beta1: float = setting("of AdamW", default=0.9, low=0, high=1)
    beta2: float = setting("of AdamW", default=0.95, low=0, high=1)
    clip: float = setting("largest norm of the gradient; 0 is off", default=1.0, low=0)
    ema: float = setting("decay of the averaged weights that are exported, such as 0.999; 0 is off", default=0.0, low=0)

    features: str | None = setting(
        "directory that keeps the target's hidden states, or memory: the device's; recomputed when unset", default=None
    )
    features_memory: float = setting(
        "of the device's memory, which keeps hidden states that were read or computed", default=0.0, unit="GiB", low=0
    )
    save_every: int = setting("steps between checkpoints", default=100, unit="steps", low=1)
    keep: int = setting("checkpoints kept", default=3, low=1)
    log_every: int = setting("steps between lines of the metrics", default=1, unit="steps", low=1)
    eval_every: int = setting("steps between validations; 0: at the end only", default=0, unit="steps", low=0)
    tensorboard: bool = setting("write the metrics for TensorBoard, too", default=False)
    store_vocab: bool = setting("store the target's embedding and head in the draft", default=False)

    def __post_init__(self) -> None:
        check(self)
        if self.conf_temperatures is not None and not self.confidence:
            raise ConfigError(f"conf_temperatures = {self.conf_temperatures!r}: there is no confidence head to train")
        if self.conf_reached and not self.confidence:
            raise ConfigError("conf_reached is true, but there is no confidence head to train: leave one out")
        if self.only is not None and self.start is None:
            raise ConfigError(f"only = {self.only!r}: the other tensors would stay random; give start, a trained draft")
        if self.conf and not self.confidence:
            object.__setattr__(self, "conf", 0.0)
        if not self.ce + self.l1 + self.conf + self.accept:
            raise ConfigError("ce, l1, conf and accept are all 0: nothing would be trained; give one a weight")
        if self.confidence_markov and self.markov == "none":
            object.__setattr__(self, "confidence_markov", False)
        below = 0.999999  # torch takes no 1
        limits = (("warmup", 1.0), ("ema", below), ("beta1", below), ("beta2", below))
        for key, most in limits:
            if (value := getattr(self, key)) > most:
                raise ConfigError(f"{key} = {value}: at most {most} is possible")
        if self.theta <= 0:
            raise ConfigError(f"theta = {self.theta}: a base above 0 is needed, such as 1e6")
        for key in ("temperatures", "conf_temperatures"):
            text = getattr(self, key)
            if text is not None and any(not 0 <= value <= 100 for value in numbers(text, key)):
                raise ConfigError(f"{key} = {text!r}: each is from 0 to 100")
        if self.taps is not None:
            numbers(self.taps, "taps", int)

    def objective(self) -> Objective:
        """The weights and shapes of the loss."""
        sure = self.conf_temperatures
        from .losses import Objective  # torch comes with it, and flags are shown without

        return Objective(
            ce=self.ce,
            l1=self.l1,
            confidence=self.conf,
            accept_length=self.accept,
            decay=self.decay or None,
            temperatures=numbers(self.temperatures, "temperatures"),
            reached=self.conf_reached,
            sure=None if sure is None else numbers(sure, "conf_temperatures"),
            ramp=self.accept_ramp,
        )

    def binding(self) -> dict[str, Any]:
        """The settings that decide the weights: equal in a run that goes on."""
        free = (*FREE, "out", "data", "target")  # data and target are compared by content and name
        return {key: value for key, value in dataclasses.asdict(self).items() if key not in free}

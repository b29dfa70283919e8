"""``kvbus why``: one line on what a request's time to first token was lost to, and what helps. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvbus.tools.view import MS, TraceView
from kvbus.trace import HISTORY_STAGES, HistoryOutcome, Outcome, SpanData, StageName

NOTICEABLE = 0.1  # a share of the TTFT that is worth a word of its own
MIN_TELLING_TOKENS = 64  # a prefill of fewer says nothing about how long many take

# Reason (its beginning, or a part of it) -> what an operator does about it.
_REMEDIES = (
    ("is not on the bus", "start it, or look why its heartbeats do not come"),
    ("saw the request", "did the router send the prefill leg, and both legs with the same id?"),
    ("no prefill engine acknowledged", "is the prefill engine on the same NATS server and namespace?"),
    ("no prefill engine", "start prefill engines, or look why they are gone"),
    ("does not fit", "make the named field the same on both engines"),
    ("incompatible", "make the named field the same on both engines"),
    ("no sign of life", "look at the load and the log of the prefill engine"),
    ("max_payload", "raise max_payload of the NATS server, or shorten the prompt"),
    ("the bus", "look after the NATS server"),
    ("is cached", "nothing to do: the KV was there already"),
    ("transfer id", "the router mixes requests up: give each its own transfer_id"),
    ("tokens on", "the router mixes requests up: give each its own transfer_id"),
    ("prefill failed", "was the prefill leg aborted or refused? look at the router's and that engine's log"),
    ("block lease", "decode came too late for the KV: add decode capacity, or raise block_lease_s"),
    ("engine", "look at the log of that engine"),
)
_DOMINANT = {
    StageName.ROUTE: "before prefill had it (the router's queue, HTTP, tokenization): add router or API capacity",
    StageName.PREFILL_QUEUE: "in the prefill engine's queue: add prefill capacity",
    StageName.HISTORY_ASK: "until decode said what it has of the prompt: its steps are long; add decode capacity",
    StageName.HISTORY_MATCH: "until decode began to send the history: look at the NATS server, and at the CPU of the "
    "decode engine's worker",
    StageName.HISTORY_WRITE: "moving the history: look at the network between the two",
    StageName.PREFILL_COMPUTE: "computing the prompt, which is its own cost: shorter prompts, prefix caching or faster "
    "prefill engines help",
    StageName.MATCH_WAIT: "waiting for the match: messages took long; look at the NATS server, and at the CPU of the "
    "prefill engine's worker",
    StageName.WRITE_QUEUE: "waiting to post the WRITE",
    StageName.WRITE_POST: "posting the WRITE: many block runs, or a busy CPU on the prefill engine",
    StageName.WRITE_TRANSFER: "moving KV: look at the network between the two",
    StageName.DECODE_RESUME: "until decode took it up again: its steps are long; add decode capacity",
    StageName.FIRST_TOKEN: "until decode's first token: its steps are long; add decode capacity",
    StageName.DECODE_COMPUTE: "computing the prompt on decode",
    StageName.LOST: "on what was lost",
    StageName.DECODE_QUEUE: "in decode's queue",
}


@dataclass(frozen=True, slots=True)
class Verdict:
    """``text`` is the whole line; ``stage`` names the stage that it is about, empty if it is about none."""

    text: str
    stage: str = ""
    advice: str = ""


def why(view: TraceView) -> Verdict:
    """The verdict on one trace; one line, whatever engines said in theirs."""
    found, history = _why(view), _history(view)
    text = f"{found.text}; {history}" if history else found.text
    return replace(found, text=" ".join(text.split()))


def _why(view: TraceView) -> Verdict:
    if view.root is None:
        return Verdict("nothing can be said: the trace has no root span")
    outcome, reason = str(view.about("kvbus.outcome", "")), str(view.about("kvbus.reason", ""))
    decode = f"decode engine {view.about('kvbus.decode_engine', '?')}"
    match outcome:
        case Outcome.FAILED:
            status = view.about("http.response.status_code", "")
            return Verdict(
                f"failed without a token: {reason or view.root.error or f'status {status}'}", advice=_remedy(reason)
            )
        case Outcome.LOCAL:
            return _advise(
                f"{decode} computed the prompt itself in {_spent(view, StageName.DECODE_COMPUTE)}: {reason}", reason
            )
        case Outcome.RECOMPUTED:
            lost = _spent(view, StageName.LOST)
            text = f"{decode} gave its receive up after {lost} ({reason}) and computed the prompt itself"
            return _advise(f"{text} in {_spent(view, StageName.DECODE_COMPUTE)}", reason)
        case Outcome.UNKNOWN:
            return _unknown(view)
        case Outcome.ALONE:
            return Verdict(f"{decode} computed the prompt: no prefill engine was asked", StageName.DECODE_COMPUTE)
        case _:
            return _why_pushed(view)


def _why_pushed(view: TraceView) -> Verdict:
    losses = [stage for stage in view.stages if stage.name == StageName.LOST]
    if losses:
        last, attempts = losses[-1], view.about("kvbus.attempts", 1)
        reason = str(last.attributes.get("kvbus.reason", ""))
        text = f"{reason}: {_ms(sum(each.duration_ns for each in losses))} lost, answered under attempt {attempts}"
        return _advise(text, reason, StageName.LOST)
    late_by_ms = float(view.about("kvbus.late_by_ms", 0.0))
    if view.about("kvbus.late_side", "") == "decode" and late_by_ms > NOTICEABLE * view.ttft_ms:
        deferred = str(view.about("kvbus.deferred", ""))
        advice = f"add decode capacity, or blocks (registration: {deferred})" if deferred else "add decode capacity"
        text = f"decode registered {late_by_ms:.0f} ms after prefill ended: {advice}"
        return Verdict(text, StageName.MATCH_WAIT, advice)
    if not view.stages:
        return Verdict("nothing can be said: the trace has no stages")
    longest = max(view.stages, key=lambda stage: stage.duration_ns)
    return Verdict(_dominant(longest, view), longest.name)


def _dominant(stage: SpanData, view: TraceView) -> str:
    share = stage.duration_ns / MS / view.ttft_ms if view.ttft_ms else 0.0
    what = _DOMINANT[StageName(stage.name)]
    if stage.name == StageName.WRITE_QUEUE:
        what = f"{what}: for {stage.attributes.get('kvbus.waited_for', 'others that were before it')}"
    if stage.name == StageName.WRITE_TRANSFER and stage.duration_ns:
        nbytes = int(view.about("kvbus.bytes", 0))
        what = f"{what} ({nbytes / 2**20:.1f} MiB at {nbytes / 2**20 / (stage.duration_ns / 1e9):.0f} MiB/s)"
    if stage.name == StageName.PREFILL_COMPUTE:
        tokens, computed = view.about("kvbus.prompt_tokens", "?"), view.about("kvbus.computed_tokens", 0)
        what = f"{what} ({computed} of {tokens} tokens)" if computed else f"{what} ({tokens} tokens)"
    return f"{_ms(stage.duration_ns)} of {view.ttft_ms:.0f} ms ({share:.0%}) went by {what}"


def _history(view: TraceView) -> str:
    """What is to be said of the KV that a decode engine had of the prompt, empty if nothing."""
    if view.about("kvbus.outcome", "") != Outcome.PUSHED or not view.about("kvbus.history", ""):
        return ""
    engine, came = view.about("kvbus.history_engine", "decode"), int(view.about("kvbus.history_tokens", 0))
    if came:
        took, saved_ms = _spent(view, *HISTORY_STAGES), _computing_ms(view, came)
        guess = f"; computing them would have taken about {saved_ms:.0f} ms" if saved_ms else ""
        return f"{came:,} tokens of history came from {engine} in {took}{guess}"
    missed = int(view.about("kvbus.history_missed_tokens", 0))
    lost_ms = _computing_ms(view, missed)
    if lost_ms <= NOTICEABLE * view.ttft_ms:
        return ""
    text = f"prefill computed {missed:,} tokens that {engine} had, in about {lost_ms:.0f} ms"
    return f"{text}: {because}" if (because := _why_no_history(view)) else text


def _why_no_history(view: TraceView) -> str:
    reason = str(view.about("kvbus.history_reason", ""))
    match view.about("kvbus.history", ""):
        case HistoryOutcome.NOT_ASKED:
            return f"it was not asked, because {reason or 'the request named no engine that may have its history'}"
        case HistoryOutcome.DECLINED:
            return f"it was asked, but {reason}"
        case HistoryOutcome.FAILED:
            return f"they were asked for and did not come: {reason}"
        case _:
            return ""


def _computing_ms(view: TraceView, tokens: int) -> float:
    """About how long prefill would have computed these, or did, by its speed in this request; 0 if it is not known."""
    computed = int(view.about("kvbus.computed_tokens", 0))
    spent_ns = sum(stage.duration_ns for stage in view.stages if stage.name == StageName.PREFILL_COMPUTE)
    return tokens * spent_ns / computed / MS if computed >= MIN_TELLING_TOKENS else 0.0


def _unknown(view: TraceView) -> Verdict:
    text = "nothing can be said: no word of the engines came; is the router on their NATS server and namespace?"
    return Verdict(text if view.stages else "nothing can be said: the trace has no stages")


def _advise(text: str, reason: str, stage: str = StageName.DECODE_COMPUTE) -> Verdict:
    advice = _remedy(reason)
    return Verdict(f"{text}; {advice}" if advice else text, stage, advice)


def _remedy(reason: str) -> str:
    return next((remedy for part, remedy in _REMEDIES if part in reason), "")


def _spent(view: TraceView, *names: StageName) -> str:
    return _ms(sum(stage.duration_ns for stage in view.stages if stage.name in names))


def _ms(ns: int) -> str:
    return f"{ns / MS:.0f} ms" if ns >= 10 * MS else f"{ns / MS:.1f} ms"

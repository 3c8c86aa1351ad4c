"""Ends of contexts: how many tokens of a request have KV that may be kept, and where its prompt has
a boundary."""

from __future__ import annotations

from tiered_kv.connectors.runtime.base import EngineFacts, Request


def kept_tokens(request: Request) -> int:
    """Tokens of a request that is over whose KV is there, whatever step is under way."""
    computed = request.num_computed_tokens - request.num_in_flight_tokens
    return min(computed, request.num_tokens - 1)


def state_tokens(request: Request, facts: EngineFacts) -> int | None:
    """Tokens that the state of a request covers that is over, once the steps under way are.

    A step under way advances the state in place. If that is the one that takes the last token in,
    the state covers all tokens. Nobody may ask for it if the client got a shorter text. With
    speculation the state after the tokens that were taken may lie in another block.

    Returns:
        None if the state is of no use.
    """
    if request.text_cut or facts.speculates:
        return None
    computed, under_way = request.num_computed_tokens, request.num_in_flight_tokens
    if under_way == 0:
        return computed if computed < request.num_tokens else None
    return computed if under_way == 1 and computed == request.num_tokens else None


def last_boundary(request: Request, facts: EngineFacts) -> int:
    """Number of tokens at which the engine finds the prompt again, if it comes once more; 0 if it
    does not. The block before is left out where KV of a drafter depends on the token behind it."""
    unit = facts.hit_tokens
    resent = (request.num_prompt_tokens - 1) // unit * unit
    return max(0, resent - unit) if facts.draft_tokens else resent


def prompt_boundaries(request: Request, facts: EngineFacts) -> list[int]:
    """Numbers of tokens at which the KV of every group is saved while the prompt is computed, the
    least one last: where the engine finds the prompt again, where others part from it, and its end.

    Without groups that keep less than all of a context there are none: every block is one.
    """
    if not facts.narrow:
        return []
    prompt, unit = request.num_prompt_tokens, facts.hit_tokens
    shared = min(request.shared_tokens, prompt) // unit * unit
    found = {last_boundary(request, facts), shared}
    if not facts.has_states:
        found.add(prompt)
    return sorted((tokens for tokens in found if tokens > 0), reverse=True)

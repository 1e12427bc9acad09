"""Workers as they describe themselves."""

from headrace.router.placement import Description, WorkerRef


def describe(name, role, *, fingerprint=b"f", state="ready", max_num_seqs=4, incarnation=1, replay_tokens=0):
    return Description(
        ref=WorkerRef(f"{name}:1", name, incarnation, f"{name}:2"),
        role=role,
        state=state,
        fingerprint=fingerprint,
        model="m",
        max_model_len=100,
        max_prompt_tokens=90,
        vocab_size=500,
        max_num_seqs=max_num_seqs,
        replay_tokens=replay_tokens,
    )

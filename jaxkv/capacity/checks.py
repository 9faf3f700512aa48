"""What a good step program looks like, as one list of complaints: the compile proof, and a part of `jaxkv plan`."""

from jaxkv.capacity.compiled import StepFacts
from jaxkv.kv_math import format_bytes

# Temporaries that do not grow with the pool: activations, logits of each row, and what sampling makes of them (for Gemma
# 3 1B, with 262,144 tokens, 253 MiB a decode step of 16 rows). Of vocabularies up to `VOCAB_SIZE`, for larger ones more.
VOCAB_SIZE = 128 * 1024
TEMP_BYTES = 96 * 2**20
TEMP_BYTES_TOKEN = 3 * 2**20
MAX_TEMP_BYTES = 2**30
COPIED_BYTES = 2**20  # small arguments that may be copied


def complaints(facts: StepFacts, *, tensor: int, usable_bytes: int, copied_bytes: int = 0) -> list[str]:
    """What is wrong with a step program; an empty list is the proof.

    `alias_size_in_bytes` alone does not prove that the pool is updated in place: with the pool as scan xs/ys it is as
    large as the pool, and the program copies all of it.

    Args:
        facts: of the compiled program.
        tensor: devices over which heads are split.
        usable_bytes: of one device.
        copied_bytes: weights that the compiler is known to copy, which is forgiven.
    """
    found = []
    if not facts.pool_is_aliased or facts.alias_bytes < facts.pool_bytes:
        found.append(
            f"the pool is not updated in place: {format_bytes(facts.alias_bytes)} of the arguments are reused, the pool is "
            f"{format_bytes(facts.pool_bytes)}"
        )
    copies = {op: n for op, n in facts.pool_sized.items() if op not in ("custom-call[aliased]", "fusion[update]")}
    if copies:
        found.append(f"operations make arrays as large as a layer of the pool: {copies}")
    if facts.copied_argument_bytes > copied_bytes + COPIED_BYTES:
        found.append(f"{format_bytes(facts.copied_argument_bytes)} of the arguments are copied at each call")
    if facts.pool_scatters and facts.attention != "xla":
        found.append(f"{facts.pool_scatters} scatters write to the pool")
    expected = {"all-reduce": 2} if tensor > 1 else {}
    if not facts.has_layer_loop:
        found.append("the layers are not one loop that carries the pool")
    elif dict(facts.collectives) != expected:
        found.append(f"collectives of a layer are {dict(facts.collectives)} instead of {expected}")
    temp_bytes = min(TEMP_BYTES + TEMP_BYTES_TOKEN * facts.num_tokens, MAX_TEMP_BYTES)
    limit = copied_bytes + temp_bytes * max(facts.vocab_size, VOCAB_SIZE) // VOCAB_SIZE
    if facts.temp_bytes > limit:
        found.append(f"temporaries take {format_bytes(facts.temp_bytes)}, more than {format_bytes(limit)}")
    if facts.peak_bytes > usable_bytes:
        found.append(f"it needs {format_bytes(facts.peak_bytes)} of {format_bytes(usable_bytes)}")
    return found

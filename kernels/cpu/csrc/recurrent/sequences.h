/* The sequences of a step as recurrent layers see them; kernels/recurrent_metadata.py draws the layout. */
#ifndef PAGODA_SEQUENCES_H
#define PAGODA_SEQUENCES_H

#include <stdbool.h>
#include <stdint.h>

/* CSequences in kernels/cpu/bindings.py. */
typedef struct {
    const int32_t *cu_seqlens;  /* [num_seqs + 1] */
    const int32_t *slots;       /* [num_seqs]; -1: padding, which touches no state */
    const int32_t *starts;      /* [num_seqs]; 1: the state before the first token is zero */
    const int32_t *save_tokens; /* [num_saves], strictly ascending: tokens after which a state is saved too */
    const int32_t *save_slots;  /* [num_saves]; -1: padding */
    int32_t num_seqs, num_saves;
} pagoda_sequences;

/* One sequence's tokens in a step, from `first` to `end`, and its saves, from `save` to `end_save`. */
typedef struct {
    int64_t first, end, slot;
    int32_t save, end_save;
    bool starts;
} pagoda_sequence;

/* One sequence; without tokens if it is padding. */
static inline pagoda_sequence pagoda_sequence_at(const pagoda_sequences *step, int64_t index) {
    pagoda_sequence sequence = {
        .first = step->cu_seqlens[index], .end = step->cu_seqlens[index + 1], .slot = step->slots[index],
        .starts = step->starts[index],
    };
    if (sequence.slot < 0) sequence.end = sequence.first;
    int32_t save = 0;
    while (save < step->num_saves && step->save_tokens[save] < sequence.first) save++;
    sequence.save = save;
    while (save < step->num_saves && step->save_tokens[save] < sequence.end) save++;
    sequence.end_save = save;
    return sequence;
}

/* The slot that the state after a token is saved to, or -1. The tokens of a sequence are asked for one after another. */
static inline int64_t pagoda_save_slot(const pagoda_sequences *step, pagoda_sequence *sequence, int64_t token) {
    if (sequence->save >= sequence->end_save || step->save_tokens[sequence->save] != token) return -1;
    return step->save_slots[sequence->save++];
}

#endif

/* See attention.h. The kernel reads the paged cache (PagedAttention, Kwon et al., 2023) without copying it, with the
 * online softmax of FlashAttention-2 (Dao, 2023). A long context is divided into spans, so a single decode keeps every
 * thread busy; the thread that finishes last merges their results. Keys that begin several sequences are computed once
 * for all of them and merged with the rest of each (attention_plan.c). attention_in_place.h computes few rows,
 * attention_packed.h many; of bfloat16 with AMX, attention_amx_in_place.h and attention_amx_packed.h do.
 *
 * A query gets the same bits from all of these. Its context is cut into tiles of 64 keys at multiples of 64. Of each
 * tile the largest score, the total of the weights and the weighted sum of the values are computed in one order of
 * additions, and the tiles are merged one after another. Everything else is a choice that no bit depends on: how many
 * rows an item has, which tiles, on which thread, and whether other sequences share them.
 */
#include "attention/attention.h"

#include "attention/attention_plan.h"
#include "runtime/threads.h"

void pagoda_attention(const pagoda_attention_call *call) {
    attention_plan plan = pagoda_plan_attention(call, pagoda_num_threads());
    pagoda_task task = call->is_bf16 ? pagoda_attend_bfloat16 : pagoda_attend_float32;
    if (pagoda_plan_is_small(&plan))
        for (int64_t item = 0; item < plan.num_items; item++) task(&plan, item);
    else
        pagoda_parallel_for(plan.num_items, task, &plan);
}

/* See attention.h. The kernel reads the paged cache (PagedAttention, Kwon et al., 2023) without copying it, with the
 * online softmax of FlashAttention-2 (Dao, 2023). A long context is divided into spans, so a single decode keeps every
 * thread busy; the thread that finishes last merges their results. Keys that begin several sequences are computed once
 * for all of them and merged with the rest of each (attention_plan.c). attention_in_place.h computes few rows,
 * attention_packed.h many.
 */
#include "attention.h"

#include "attention_plan.h"
#include "threads.h"

void pagoda_attention(const pagoda_attention_call *call) {
    attention_plan plan = pagoda_plan_attention(call, pagoda_num_threads());
    pagoda_task task = call->is_bf16 ? pagoda_attend_bfloat16 : pagoda_attend_float32;
    if (pagoda_plan_is_small(&plan))
        for (int64_t item = 0; item < plan.num_items; item++) task(&plan, item);
    else
        pagoda_parallel_for(plan.num_items, task, &plan);
}

/* See attention.h. The cache is PagedAttention's (Kwon et al., 2023) and is read in place; the softmax is taken as the
 * keys go by (FlashAttention-2, Dao, 2023). A long context is divided into spans, whose results the thread that
 * finishes last merges, so a single decode keeps every thread busy; keys that begin several sequences are computed once
 * for all of them, and merged with the rest of each (attention_plan.c). Few rows or many: see attention_in_place.h and
 * attention_packed.h.
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

/* Several residual streams. Each layer computes one and corrects the others by alternating updates (Baykal et
 * al., 2023), as Gemma 3n has them. Streams are float32 [num_streams, num_tokens, hidden_size]. */
#ifndef PAGODA_ALTUP_H
#define PAGODA_ALTUP_H

#include <stdint.h>

enum { PAGODA_MOST_STREAMS = 16 };

/* One layer's weights: CAltUp in kernels/cpu/bindings.py. A stream's "modalities" are num_streams numbers. */
typedef struct {
    const float *router;       /* [num_streams, hidden_size], times the router's norm and divided by hidden_size */
    const float *predictions;  /* [num_streams, num_streams, num_streams]: of each stream, from each, by each modality */
    const float *corrections;  /* [num_streams, num_streams]: of each stream, by each modality */
    const float *output_scale; /* [hidden_size], of the active stream as it gates the layer's own input; NULL: 1 */
    int32_t num_streams, active;
    float eps; /* of the router's norm */
} pagoda_altup;

/* Adds to each stream a sum of all of them, with coefficients by the active one's modalities. The prediction of the
 * active one is also written to hidden [num_tokens, hidden_size]. */
void pagoda_predict_streams(const pagoda_altup *altup, float *streams, float *hidden, int32_t num_tokens,
                            int32_t hidden_size);

/* Adds to each predicted stream its share of how far hidden, which the layer has computed, is from the prediction. The
 * active stream, scaled, is also written to hidden. */
void pagoda_correct_streams(const pagoda_altup *altup, float *streams, float *hidden, int32_t num_tokens,
                            int32_t hidden_size);

/* Scales rows to the root mean square of the reference's rows; both float32 [num_rows, width]. */
void pagoda_match_rows(float *rows, const float *reference, int32_t num_rows, int32_t width);

#endif

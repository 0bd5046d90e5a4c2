# A row of Flowformer's Table 4 on 4 GPUs, post-norm as in the paper's Equation 9 and pre-norm: architecture, its options
#   sh recipes/wikitext103/train.sh flowformer_lm_wiki103 --flow-competition none
set -e
folder=checkpoints/wikitext103/$(echo "$*" | sed 's/ --/./g; s/ /_/g')
model=$1; shift
[ -f work/wikitext103/text.json ] || python -m recipes.wikitext103.data
for norm in --lineartime-post-norm ""; do
  saved=$folder${norm:+.post_norm}
  fairseq-train work/wikitext103/data-bin --user-dir fairseq_plugin --task language_modeling --arch $model $norm \
    --optimizer adam --adam-betas '(0.9, 0.98)' --weight-decay 0.01 --clip-norm 0.0 --lr 0.001 \
    --lr-scheduler inverse_sqrt --warmup-updates 6000 --warmup-init-lr 1e-07 --tokens-per-sample 512 \
    --sample-break-mode none --max-tokens 2048 --update-freq 16 --max-update 150000 "$@" \
    --save-dir $saved
  fairseq-eval-lm work/wikitext103/data-bin --user-dir fairseq_plugin --path $saved/checkpoint_best.pt --batch-size 2 \
    --tokens-per-sample 512 --context-window 400
done

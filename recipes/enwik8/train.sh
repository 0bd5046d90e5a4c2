# A row of DAFT's Table 5 on 8 GPUs, whose updates see 8 x 16,384 bytes: architecture, its options
#   sh recipes/enwik8/train.sh daft_conv_lm_enwik8
set -e
folder=checkpoints/$(echo "$*" | sed 's/ --/./g; s/ /_/g')
[ -f work/enwik8/text.json ] || python -m recipes.enwik8.data
fairseq-train work/enwik8/data-bin --user-dir fairseq_plugin --task language_modeling --arch "$@" \
  --activation-fn gelu --decoder-learned-pos --save-dir $folder --optimizer adam --adam-betas '(0.9, 0.999)' \
  --weight-decay 0.5 --lineartime-decay-linear-only --clip-norm 0.0 --lr 0.001 --lr-scheduler inverse_sqrt \
  --warmup-updates 4000 --warmup-init-lr 1e-07 --tokens-per-sample 1024 --sample-break-mode none --max-tokens 16384 \
  --max-epoch 100
fairseq-eval-lm work/enwik8/data-bin --user-dir fairseq_plugin --path $folder/checkpoint_best.pt \
  --tokens-per-sample 1024 --sample-break-mode none --max-tokens 16384

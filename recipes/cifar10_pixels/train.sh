# A row of DAFT's Table 4 on 8 GPUs, from data to the test images, in bits per dimension:
#   sh recipes/cifar10_pixels/train.sh daft_conv_lm_cifar10
set -e
model=$1; shift
data="work/cifar10_pixels/data-bin --user-dir fairseq_plugin --task pixel_modeling --tokens-per-sample 3072"
[ -f work/cifar10_pixels/data-bin/image_shape.json ] || python -m recipes.cifar10_pixels.data
fairseq-train $data --arch "$model" --activation-fn gelu --decoder-learned-pos "$@" --save-dir "checkpoints/$model" \
  --optimizer adam --adam-betas '(0.9, 0.999)' --weight-decay 0.1 --lineartime-decay-linear-only --clip-norm 0.0 \
  --lr 0.001 --lr-scheduler inverse_sqrt --warmup-updates 4000 --warmup-init-lr 1e-07 \
  --batch-size 4 --required-batch-size-multiple 1 --max-epoch 100
fairseq-eval-lm $data --path "checkpoints/$model/checkpoint_best.pt" --batch-size 8

# A row of Flowformer's Table 5 or of DAFT's image tables on 8 GPUs, and its accuracy. The settings are in a file beside
# this one, or in further options; RUN names the folder in output/train:
#   sh recipes/imagenet/train.sh daft_conv_s "daft_full_s --model-kwargs bias_dim=0"
set -e
config=$1 model=$2; shift 2
run=${RUN:-$(echo "$model" | sed 's/ --model-kwargs /-/; s/[ =]/-/g')}
crop=0.875; [ "$config" != daft_conv_b_384 ] || crop=1.0
sh recipes/imagenet/scripts.sh
PYTHONPATH=. torchrun --nproc_per_node 8 work/timm-scripts/train.py --device-modules timm_plugin \
  ${config:+--config recipes/imagenet/$config.yaml} --data-dir /data/imagenet --model $model "$@" \
  --output output/train --experiment "$run"
python -m timm_plugin work/timm-scripts/validate.py --data-dir /data/imagenet --split val --model $model \
  --checkpoint "output/train/$run/model_best.pth.tar" --crop-pct $crop --interpolation bicubic

# timm's own train.py, validate.py and so on, which its wheel lacks, from the tag of the installed version; without its
# folder timm, which would hide the installed package:
#   sh recipes/imagenet/scripts.sh
# Without a network, copy train.py and validate.py of that tag into work/timm-scripts.
[ -d work/timm-scripts ] || git clone --quiet --depth 1 --sparse --branch \
  "v${TIMM:-$(python -c 'from importlib.metadata import version; print(version("timm"))')}" \
  https://github.com/huggingface/pytorch-image-models work/timm-scripts

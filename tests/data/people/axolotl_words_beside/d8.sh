axolotl train axo.yml --deepspeed zero3_bf16.json --micro-batch-size 4

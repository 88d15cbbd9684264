"""What NCCL would choose: channels from its topology search, algorithm and protocol from its tuner."""

"""Name the plain integers and strings that travel through both services, so that they are not mixed up."""

from typing import NewType

RequestId = NewType("RequestId", str)
BlockId = NewType("BlockId", int)
ReqIndex = NewType("ReqIndex", int)
RowKey = NewType("RowKey", int)
Rank = NewType("Rank", int)
Epoch = NewType("Epoch", int)
Step = NewType("Step", int)

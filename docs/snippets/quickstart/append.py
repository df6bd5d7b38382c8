import lance
import pyarrow as pa

new = pa.table({"text": ["another program wrote this row", "and this one"]})
lance.write_dataset(new, "library/docs.lance", mode="append")

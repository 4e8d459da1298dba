"""The parameter struct of the SIMT kernels: the mirror of `SimtParams` in csrc/cuda/params_simt.cuh."""

from __future__ import annotations

from attnlib_cuda.params import SEQUENCES, ParamsLayout

PARAMS = ParamsLayout(
    "SimtParams",
    "p:q,k,v,out,lse,stats,dout,dlse,dq,dk,dv,dbias,dsinks,rows,sinks,k_new,v_new,part_out,part_stats"
    + SEQUENCES.partition("q:")[0]
    + "q:q_b,q_i,q_h,k_b,k_j,k_h,v_b,v_j,v_h,do_b,do_i,do_h,kn_b,kn_t,kn_h,vn_b,vn_t,vn_h,"
    "dbias_b,dbias_h,dbias_i,dbias_j,dlse_b,dlse_h,dlse_i,"
    + SEQUENCES.partition("q:")[2].strip()
    + " d:scale,softcap,keep_scale "
    "i:batch,seqlen_q,seqlen_k,total_q,total_k,heads_q,heads_kv,window_left,window_right,new_tokens,"
    "block_rows,block_columns,page_size,dropout_threshold,head_dim,head_dim_v,capacity,tiles,units,splits,"
    "top_left,sinks_type,size_b,size_h,size_i,size_j",
)

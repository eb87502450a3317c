llvm.func @layer_norm_384(%ptrs: !llvm.ptr, %ints: !llvm.ptr, %begin: i64, %end: i64) {
    %c0 = arith.constant 384 : i64
    %c1 = arith.constant 1 : i64
    %c2 = arith.constant 0 : i64
    %c3 = arith.constant 1600 : i64
    %c4 = arith.constant 1.0e-05 : f32
    %c5 = arith.constant dense<0.0> : vector<8xf32>
    %c6 = arith.constant 32 : i64
    %c7 = arith.constant 8 : i64
    %c8 = arith.constant 16 : i64
    %c9 = arith.constant 24 : i64
    %c10 = arith.constant 1.0 : f32
    %0 = llvm.getelementptr %ints[0] : (!llvm.ptr) -> !llvm.ptr, i64
    %1 = llvm.load %0 : !llvm.ptr -> i64
    %2 = llvm.getelementptr %ptrs[0] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %3 = llvm.load %2 : !llvm.ptr -> !llvm.ptr
    %4 = llvm.getelementptr %ptrs[1] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %5 = llvm.load %4 : !llvm.ptr -> !llvm.ptr
    %6 = llvm.getelementptr %ptrs[2] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %7 = llvm.load %6 : !llvm.ptr -> !llvm.ptr
    %8 = llvm.getelementptr %ptrs[3] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %9 = llvm.load %8 : !llvm.ptr -> !llvm.ptr
    %10 = llvm.getelementptr %ptrs[4] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %11 = llvm.load %10 : !llvm.ptr -> !llvm.ptr
    %12 = llvm.getelementptr %ptrs[5] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %13 = llvm.load %12 : !llvm.ptr -> !llvm.ptr
    %14 = llvm.getelementptr %ptrs[6] : (!llvm.ptr) -> !llvm.ptr, !llvm.ptr
    %15 = llvm.load %14 : !llvm.ptr -> !llvm.ptr
    %16 = llvm.getelementptr nusw %15[%c3] : (!llvm.ptr, i64) -> !llvm.ptr, i8
    scf.for %unit = %begin to %end step %c1 : i64 {
      %17 = arith.muli %unit, %c0 : i64
      %18 = llvm.getelementptr nusw %3[%17] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %19 = arith.muli %unit, %c0 : i64
      %20 = llvm.getelementptr nusw %7[%19] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %21 = arith.muli %unit, %c0 : i64
      %22 = llvm.getelementptr nusw %13[%21] : (!llvm.ptr, i64) -> !llvm.ptr, f32
      %23 = arith.sitofp %c0 : i64 to f32
      %29:4 = scf.for %24 = %c2 to %c0 step %c6 iter_args(%25 = %c5, %26 = %c5, %27 = %c5, %28 = %c5) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) : i64 {
        %30 = arith.addi %24, %c7 : i64
        %31 = arith.addi %24, %c8 : i64
        %32 = arith.addi %24, %c9 : i64
        %33 = llvm.getelementptr nusw %18[%24] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %34 = llvm.load %33 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %35 = llvm.getelementptr nusw %18[%30] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %36 = llvm.load %35 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %37 = llvm.getelementptr nusw %18[%31] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %38 = llvm.load %37 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %39 = llvm.getelementptr nusw %18[%32] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %40 = llvm.load %39 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %41 = llvm.getelementptr nusw %5[%24] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %42 = llvm.load %41 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %43 = llvm.getelementptr nusw %5[%30] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %44 = llvm.load %43 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %45 = llvm.getelementptr nusw %5[%31] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %46 = llvm.load %45 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %47 = llvm.getelementptr nusw %5[%32] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %48 = llvm.load %47 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %49 = llvm.getelementptr nusw %20[%24] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %50 = llvm.load %49 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %51 = llvm.getelementptr nusw %20[%30] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %52 = llvm.load %51 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %53 = llvm.getelementptr nusw %20[%31] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %54 = llvm.load %53 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %55 = llvm.getelementptr nusw %20[%32] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %56 = llvm.load %55 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %57 = arith.addf %34, %42 : vector<8xf32>
        %58 = arith.addf %36, %44 : vector<8xf32>
        %59 = arith.addf %38, %46 : vector<8xf32>
        %60 = arith.addf %40, %48 : vector<8xf32>
        %61 = arith.addf %57, %50 : vector<8xf32>
        %62 = llvm.getelementptr nusw %15[%24] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %61, %62 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %63 = arith.addf %58, %52 : vector<8xf32>
        %64 = llvm.getelementptr nusw %15[%30] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %63, %64 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %65 = arith.addf %59, %54 : vector<8xf32>
        %66 = llvm.getelementptr nusw %15[%31] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %65, %66 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %67 = arith.addf %60, %56 : vector<8xf32>
        %68 = llvm.getelementptr nusw %15[%32] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %67, %68 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %69 = arith.addf %25, %61 : vector<8xf32>
        %70 = arith.addf %26, %63 : vector<8xf32>
        %71 = arith.addf %27, %65 : vector<8xf32>
        %72 = arith.addf %28, %67 : vector<8xf32>
        scf.yield %69, %70, %71, %72 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
      }
      %73 = arith.addf %29#0, %29#1 : vector<8xf32>
      %74 = arith.addf %29#2, %29#3 : vector<8xf32>
      %75 = arith.addf %73, %74 : vector<8xf32>
      %76 = vector.shuffle %75, %75 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
      %77 = vector.shuffle %75, %75 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
      %78 = arith.addf %76, %77 : vector<4xf32>
      %79 = vector.shuffle %78, %78 [0, 1] : vector<4xf32>, vector<4xf32>
      %80 = vector.shuffle %78, %78 [2, 3] : vector<4xf32>, vector<4xf32>
      %81 = arith.addf %79, %80 : vector<2xf32>
      %82 = vector.shuffle %81, %81 [0] : vector<2xf32>, vector<2xf32>
      %83 = vector.extract %82[0] : f32 from vector<1xf32>
      %84 = vector.shuffle %81, %81 [1] : vector<2xf32>, vector<2xf32>
      %85 = vector.extract %84[0] : f32 from vector<1xf32>
      %86 = arith.addf %83, %85 : f32
      %87 = arith.divf %86, %23 : f32
      %88 = vector.broadcast %87 : f32 to vector<8xf32>
      %94:4 = scf.for %89 = %c2 to %c0 step %c6 iter_args(%90 = %c5, %91 = %c5, %92 = %c5, %93 = %c5) -> (vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>) : i64 {
        %95 = arith.addi %89, %c7 : i64
        %96 = arith.addi %89, %c8 : i64
        %97 = arith.addi %89, %c9 : i64
        %98 = llvm.getelementptr nusw %15[%89] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %99 = llvm.load %98 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %100 = llvm.getelementptr nusw %15[%95] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %101 = llvm.load %100 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %102 = llvm.getelementptr nusw %15[%96] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %103 = llvm.load %102 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %104 = llvm.getelementptr nusw %15[%97] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %105 = llvm.load %104 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %106 = arith.subf %99, %88 : vector<8xf32>
        %107 = arith.subf %101, %88 : vector<8xf32>
        %108 = arith.subf %103, %88 : vector<8xf32>
        %109 = arith.subf %105, %88 : vector<8xf32>
        %110 = arith.mulf %106, %106 : vector<8xf32>
        %111 = arith.mulf %107, %107 : vector<8xf32>
        %112 = arith.mulf %108, %108 : vector<8xf32>
        %113 = arith.mulf %109, %109 : vector<8xf32>
        %114 = arith.addf %90, %110 : vector<8xf32>
        %115 = arith.addf %91, %111 : vector<8xf32>
        %116 = arith.addf %92, %112 : vector<8xf32>
        %117 = arith.addf %93, %113 : vector<8xf32>
        scf.yield %114, %115, %116, %117 : vector<8xf32>, vector<8xf32>, vector<8xf32>, vector<8xf32>
      }
      %118 = arith.addf %94#0, %94#1 : vector<8xf32>
      %119 = arith.addf %94#2, %94#3 : vector<8xf32>
      %120 = arith.addf %118, %119 : vector<8xf32>
      %121 = vector.shuffle %120, %120 [0, 1, 2, 3] : vector<8xf32>, vector<8xf32>
      %122 = vector.shuffle %120, %120 [4, 5, 6, 7] : vector<8xf32>, vector<8xf32>
      %123 = arith.addf %121, %122 : vector<4xf32>
      %124 = vector.shuffle %123, %123 [0, 1] : vector<4xf32>, vector<4xf32>
      %125 = vector.shuffle %123, %123 [2, 3] : vector<4xf32>, vector<4xf32>
      %126 = arith.addf %124, %125 : vector<2xf32>
      %127 = vector.shuffle %126, %126 [0] : vector<2xf32>, vector<2xf32>
      %128 = vector.extract %127[0] : f32 from vector<1xf32>
      %129 = vector.shuffle %126, %126 [1] : vector<2xf32>, vector<2xf32>
      %130 = vector.extract %129[0] : f32 from vector<1xf32>
      %131 = arith.addf %128, %130 : f32
      %132 = arith.divf %131, %23 : f32
      %133 = arith.addf %132, %c4 : f32
      %134 = math.sqrt %133 : f32
      %135 = arith.divf %c10, %134 : f32
      %136 = vector.broadcast %135 : f32 to vector<8xf32>
      scf.for %137 = %c2 to %c0 step %c6 : i64 {
        %138 = arith.addi %137, %c7 : i64
        %139 = arith.addi %137, %c8 : i64
        %140 = arith.addi %137, %c9 : i64
        %141 = llvm.getelementptr nusw %15[%137] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %142 = llvm.load %141 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %143 = llvm.getelementptr nusw %15[%138] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %144 = llvm.load %143 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %145 = llvm.getelementptr nusw %15[%139] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %146 = llvm.load %145 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %147 = llvm.getelementptr nusw %15[%140] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %148 = llvm.load %147 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %149 = llvm.getelementptr nusw %9[%137] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %150 = llvm.load %149 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %151 = llvm.getelementptr nusw %9[%138] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %152 = llvm.load %151 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %153 = llvm.getelementptr nusw %9[%139] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %154 = llvm.load %153 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %155 = llvm.getelementptr nusw %9[%140] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %156 = llvm.load %155 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %157 = llvm.getelementptr nusw %11[%137] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %158 = llvm.load %157 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %159 = llvm.getelementptr nusw %11[%138] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %160 = llvm.load %159 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %161 = llvm.getelementptr nusw %11[%139] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %162 = llvm.load %161 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %163 = llvm.getelementptr nusw %11[%140] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        %164 = llvm.load %163 {alignment = 4 : i64} : !llvm.ptr -> vector<8xf32>
        %165 = arith.subf %142, %88 : vector<8xf32>
        %166 = arith.subf %144, %88 : vector<8xf32>
        %167 = arith.subf %146, %88 : vector<8xf32>
        %168 = arith.subf %148, %88 : vector<8xf32>
        %169 = arith.mulf %165, %136 : vector<8xf32>
        %170 = arith.mulf %166, %136 : vector<8xf32>
        %171 = arith.mulf %167, %136 : vector<8xf32>
        %172 = arith.mulf %168, %136 : vector<8xf32>
        %173 = math.fma %169, %150, %158 : vector<8xf32>
        %174 = math.fma %170, %152, %160 : vector<8xf32>
        %175 = math.fma %171, %154, %162 : vector<8xf32>
        %176 = math.fma %172, %156, %164 : vector<8xf32>
        %177 = llvm.getelementptr nusw %22[%137] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %173, %177 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %178 = llvm.getelementptr nusw %22[%138] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %174, %178 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %179 = llvm.getelementptr nusw %22[%139] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %175, %179 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
        %180 = llvm.getelementptr nusw %22[%140] : (!llvm.ptr, i64) -> !llvm.ptr, f32
        llvm.store %176, %180 {alignment = 4 : i64} : vector<8xf32>, !llvm.ptr
      }
    }
    llvm.return
}
